"""Scores of single tasks against the scene's truth, and the table made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_engine.maintenance.average_precision import Detection, average_precision
from training.scenes.paths import outline, path_polygon, polygon_iou
from training.scenes.scenes import Box, Scene, Shape
from training.scoring.evaluation_set import Task
from training.texts.captions import named_objects, objects_of

Record = dict[str, Any]


def inside(polygon: NDArray[np.float64], x: float, y: float) -> bool:
    """Whether a point lies in a polygon [n, 2]."""
    x0, y0 = polygon[:, 0], polygon[:, 1]
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    crosses = (y0 > y) != (y1 > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = (x1 - x0) * (y - y0) / (y1 - y0) + x0
    return bool(np.count_nonzero(crosses & (x < at)) % 2)


def box_iou(a: Box, b: Box) -> float:
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return w * h / (both - w * h)


def _point_hits(scene: Scene, targets: Iterable[int], points: list[tuple[float, float]]) -> int:
    """How many targets have a point of their own inside them."""
    left = {i: outline(scene.shapes[i]) for i in targets}
    hits = 0
    for x, y in points:
        hit = next(
            (i for i, p in left.items() if inside(p, x * scene.width, y * scene.height)), None
        )
        if hit is not None:
            del left[hit]
            hits += 1
    return hits


def _pixel_box(scene: Scene, box: Mapping[str, float]) -> Box:
    w, h = scene.width, scene.height
    return box["x_min"] * w, box["y_min"] * h, box["x_max"] * w, box["y_max"] * h


def _matched_ious(truth: list[Box], found: list[Box]) -> list[float]:
    """IoUs of one-to-one matches of at least 0.5, best first."""
    pairs = sorted(
        ((box_iou(t, f), i, j) for i, t in enumerate(truth) for j, f in enumerate(found)),
        reverse=True,
    )
    used_t: set[int] = set()
    used_f: set[int] = set()
    ious = []
    for iou, i, j in pairs:
        if iou >= 0.5 and i not in used_t and j not in used_f:
            used_t.add(i)
            used_f.add(j)
            ious.append(iou)
    return ious


def segment_iou(scene: Scene, shape: Shape, path: str, box: Mapping[str, float] | None) -> float:
    """The IoU of a path relative to ``box`` with the outline of ``shape``; 0 without a path or a box."""
    if not path or box is None:
        return 0.0
    polygon = path_polygon(path, _pixel_box(scene, box))
    return 0.0 if polygon is None else polygon_iou(polygon, outline(shape))


def _segment_ious(
    scene: Scene, task: Task, segments: list[Mapping[str, Any]]
) -> tuple[float, float]:
    """The IoUs of the result's outline, and of the model's own."""
    if not segments:
        return 0.0, 0.0
    found, shape = segments[0], scene.shapes[task.targets[0]]
    final = segment_iou(scene, shape, found.get("svg_path", ""), found.get("bbox"))
    if not found.get("refined"):
        return final, final
    return final, segment_iou(scene, shape, found["coarse_path"], found["coarse_bbox"])


def score(scene: Scene, task: Task, output: Mapping[str, Any]) -> Record:
    """One line of the record: what was asked, whether it was right, and the numbers the table needs."""
    record: Record = {"skill": task.skill, "kind": task.kind, "targets": len(task.targets)}
    if task.kind == "absent":
        segments = output.get("segments", [])
        nothing = not output.get("points") and not output.get("objects")
        record["ok"] = nothing and not any(s.get("svg_path") or s.get("bbox") for s in segments)
    elif task.skill in ("query", "reasoning"):
        record["ok"] = output["answer"].strip() == task.answer
        record["answer"] = task.answer
        if task.skill == "reasoning":
            grounding = output.get("reasoning", {}).get("grounding", [])
            points = [(float(p[0]), float(p[1])) for chunk in grounding for p in chunk["points"]]
            record["hits"] = _point_hits(scene, set(task.targets), points)
            record["found"], record["targets"] = len(points), len(set(task.targets))
    elif task.skill == "caption":
        record["ok"] = named_objects(output["caption"]) == objects_of(scene)
        record["targets"] = len(scene.shapes)
    elif task.skill == "point":
        points = [(p["x"], p["y"]) for p in output["points"]]
        record["hits"], record["found"] = _point_hits(scene, task.targets, points), len(points)
        record["ok"] = record["hits"] == record["found"] == len(task.targets)
    elif task.skill == "detect":
        found = [_pixel_box(scene, b) for b in output["objects"]]
        ious = _matched_ious([scene.shapes[i].box for i in task.targets], found)
        record["ious"], record["found"] = [round(i, 4) for i in ious], len(found)
        record["ok"] = len(ious) == len(found) == len(task.targets)
        w, h = scene.width, scene.height
        record["truth"] = [
            [x0 / w, y0 / h, x1 / w, y1 / h]
            for x0, y0, x1, y1 in (scene.shapes[i].box for i in task.targets)
        ]
        record["boxes"] = [
            [b["x_min"], b["y_min"], b["x_max"], b["y_max"], b["score"]]
            for b in output["objects"]
            if "score" in b
        ]
    else:
        final, coarse = _segment_ious(scene, task, output["segments"])
        record["iou"], record["coarse_iou"] = round(final, 4), round(coarse, 4)
        record["ok"] = record["iou"] >= 0.5
    if not record["ok"]:
        record["asked"], record["said"] = task.text, str(output)[:300]
    return record


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
