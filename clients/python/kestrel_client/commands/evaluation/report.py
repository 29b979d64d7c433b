"""The report of an evaluation: a table, JSON, and the scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..files import json_text, write_whole
from .benchmark import Benchmark, SetMetrics
from .scored import AnsweredCase, write_scores
from .statistics import Total, plain

SCORES = "scores.jsonl"
REPORT = "report.json"


@dataclass(frozen=True)
class Report:
    """What an evaluation has found. ``described``: its data and options. ``models``: the models that answered."""

    benchmark: Benchmark
    described: Mapping[str, Any]
    models: Sequence[str]
    num_images: int
    totals: Sequence[Total]
    whole: SetMetrics | None
    answered: Sequence[AnsweredCase]

    @cached_property
    def errors(self) -> dict[str, int]:
        """How many cases failed, by error."""
        return Counter(a.scored.error for a in self.answered if a.scored.error is not None)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        whole = self.whole
        return {
            **self.described,
            "models": list(self.models),
            "images": self.num_images,
            "cases": len(self.answered),
            "failed": self.failed,
            "errors": self.errors,
            "metrics": [plain(total) for total in self.totals],
            "whole": None if whole is None else {"values": dict(whole.values), "note": whole.note},
            "source": self.benchmark.source,
        }

    @property
    def title(self) -> str:
        by = f", answered by {', '.join(self.models)}" if self.models else ""
        return (
            f"{self.benchmark.title}: {self.num_images} images, {len(self.answered)} questions{by}"
        )

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures must know."""
        notes = []
        if len(self.models) > 1:
            notes.append(
                f"{len(self.models)} models have answered; --fresh starts over with one of them"
            )
        for error, count in Counter(self.errors).most_common(5):
            notes.append(f"{count} failed and count as wrong: {error}")
        if self.whole is not None and self.whole.note:
            notes.append(self.whole.note)
        return notes


def write_report(report: Report, folder: Path) -> None:
    """Writes all files of the report into ``folder``. Raises CommandError."""
    write_whole(
        folder / SCORES, lambda file: write_scores((a.scored for a in report.answered), file)
    )
    text = json_text(report.plain(), indent=1) + "\n"
    write_whole(folder / REPORT, lambda file: file.write_text(text, encoding="utf-8"))


def print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.plain(), ensure_ascii=False))
        return
    print(report.title)
    print_table(table(report))
    for note in report.notes:
        print(note)
    if report.failed:
        print("--retry-failed asks again what failed")


Table = Sequence[Sequence[str]]
"""Rows of texts; the first is the head."""


def table(report: Report) -> Table:
    rows = [["", "metric", "questions", "value", "95 % interval"]]
    for name, value in (report.whole.values if report.whole is not None else {}).items():
        rows.append(["all", name, str(len(report.answered)), percent(value), ""])
    for total in report.totals:
        interval = "" if total.low is None else f"{percent(total.low)} … {percent(total.high)}"
        rows.append([total.group, total.metric, str(total.cases), percent(total.value), interval])
    return rows


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def print_table(rows: Table) -> None:
    """Prints columns: texts to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
