"""The table of an evaluation, with the bars that the release must reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kestrel_engine.maintenance.average_precision import Detection, average_precision
from kestrel_grpc.scenes.scoring import Record


@dataclass
class Row:
    """One line of the table. ``bar``: the least value, if the row has one."""

    name: str
    count: int
    value: float
    bar: float | None = None
    percent: bool = True

    def __str__(self) -> str:
        shown = f"{100 * self.value:.2f} %" if self.percent else f"{self.value:.4f}"
        bar = (
            ""
            if self.bar is None
            else (f"{100 * self.bar:g} %" if self.percent else f"{self.bar:g}")
        )
        verdict = "" if self.bar is None else ("reached" if self.value >= self.bar else "missed")
        return f"| {self.name} | {self.count} | {shown} | {bar} | {verdict} |"


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)

    def exact(self, name: str, records: list[Record], bar: float | None = None) -> None:
        if records:
            self.rows.append(
                Row(name, len(records), sum(r["ok"] for r in records) / len(records), bar)
            )

    def ratio(
        self, name: str, part: float, whole: float, bar: float | None = None, percent: bool = True
    ) -> None:
        if whole:
            self.rows.append(Row(name, int(whole), part / whole, bar, percent))

    def __str__(self) -> str:
        head = "| what | cases | measured | bar | |\n| --- | --- | --- | --- | --- |"
        return "\n".join([head, *map(str, self.rows)])

    def as_json(self) -> list[dict[str, Any]]:
        return [vars(row) for row in self.rows]


def _spatial(table: Table, records: list[Record], prefix: str, bars: bool) -> None:
    def bar(value: float) -> float | None:
        return value if bars else None

    points = [r for r in records if r["kind"] == "point"]
    hits, found, wanted = (sum(r[k] for r in points) for k in ("hits", "found", "targets"))
    table.ratio(f"{prefix}point: targets hit", hits, wanted, bar(0.99))
    table.ratio(f"{prefix}point: points that hit", hits, found, bar(0.99))
    boxes = [r for r in records if r["kind"] == "detect"]
    ious = [i for r in boxes for i in r["ious"]]
    both = sum(r["found"] + r["targets"] for r in boxes)
    table.ratio(f"{prefix}detect: F1 at IoU 0.5", 2 * len(ious), both, bar(0.99))
    table.ratio(
        f"{prefix}detect: mean IoU of matches", sum(ious), len(ious), bar(0.94), percent=False
    )
    precision = average_precision(
        [
            Detection(
                "shape",
                tuple((x0, y0, x1, y1) for x0, y0, x1, y1 in r["truth"]),
                tuple(((x0, y0, x1, y1), score) for x0, y0, x1, y1, score in r["boxes"]),
            )
            for r in boxes
            if len(r.get("boxes", ())) == r["found"]
        ]
    )
    if precision is not None:
        for iou, value in (("0.5 to 0.95", precision.mean), ("0.5", precision.at_50)):
            name = f"{prefix}detect: average precision, IoU {iou}"
            table.rows.append(Row(name, len(boxes), value, percent=False))
    paths = [r for r in records if r["kind"] == "segment"]
    own = f"{prefix}segment, the model's own outline: mean IoU"
    for name, key, least in (
        (f"{prefix}segment: mean IoU", "iou", bar(0.92)),
        (own, "coarse_iou", None),
    ):
        table.ratio(name, sum(r[key] for r in paths), len(paths), least, percent=False)


def _groups(records: list[Record], key: str) -> list[tuple[Any, list[Record]]]:
    keys = sorted({r[key] for r in records})
    return [(k, [r for r in records if r[key] == k]) for k in keys]


def tabulate(records: list[Record]) -> Table:
    """The whole table of an evaluation."""
    table = Table()
    seen = [r for r in records if r["slice"] == "seen"]
    queries = [r for r in seen if r["skill"] == "query"]
    table.exact("query, all questions: exact", queries, 0.99)
    for kind, part in _groups(queries, "kind"):
        table.exact(f"query: {kind}", part)
    reasoned = [r for r in seen if r["skill"] == "reasoning"]
    table.exact("query with reasoning: exact", reasoned, 0.99)
    hits, found, wanted = (sum(r[k] for r in reasoned) for k in ("hits", "found", "targets"))
    table.ratio("reasoning: targets grounded", hits, wanted)
    table.ratio("reasoning: points that hit", hits, found)
    captions = [r for r in seen if r["skill"] == "caption"]
    table.exact("caption: exactly the objects there", captions, 0.97)
    for kind, part in _groups(captions, "kind"):
        table.exact(f"caption: {kind}", part)
    _spatial(table, seen, "", bars=True)
    absent = [r for r in seen if r["kind"] == "absent"]
    table.exact("absent objects: nothing found", absent, 0.99)
    for skill, part in _groups(absent, "skill"):
        table.exact(f"absent: {skill}", part)
    counts = [{**r, "number": int(r["answer"])} for r in queries if r["kind"] == "count"]
    for number, part in _groups(counts, "number"):
        table.exact(f"count question, answer {number}", part)
    for number, part in _groups(captions, "targets"):
        table.exact(f"caption, {number} objects", part)
    for name, skill in (("point", "point"), ("detect", "detect")):
        for number, part in _groups([r for r in seen if r["kind"] == skill], "targets"):
            table.exact(f"{name}, {number} wanted: all found, nothing else", part)
    for tiles, part in _groups(seen, "tiling"):
        table.exact(f"all tasks, tiling {tiles}", part)
    unseen = [r for r in records if r["slice"] != "seen"]
    table.exact("unseen pairs, all tasks: right", unseen, 0.95)
    for kind, part in _groups([r for r in unseen if r["skill"] == "query"], "kind"):
        table.exact(f"unseen pairs, query: {kind}", part)
    table.exact("unseen pairs, caption", [r for r in unseen if r["skill"] == "caption"])
    _spatial(table, unseen, "unseen pairs, ", bars=False)
    return table
