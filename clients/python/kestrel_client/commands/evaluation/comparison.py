"""``eval compare``: two runs of one data set side by side, with a paired test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import json_file
from ..flags import SettingsError
from ..parser import CommandError
from .report import REPORT, SCORES, percent, print_table
from .scored import ScoredCase, read_scores
from .statistics import Difference, differences

_METHOD = "Interval and p: paired bootstrap over images."


def compare(places: Sequence[str], *, as_json: bool) -> int:
    """Compares the runs in two folders."""
    if len(places) != 2:
        raise SettingsError("eval compare takes the two folders of --output")
    folders = [Path(place) for place in places]
    reports = [json_file(folder / REPORT) for folder in folders]
    sides = [read_scores(folder / SCORES) for folder in folders]
    names = {_text(report, "set") for report in reports}
    if len(names) != 1:
        raise CommandError(f"the runs are of different data sets: {' and '.join(sorted(names))}")
    first, second = _paired(*sides)
    if not first:
        raise CommandError("the runs have no question in common")
    found = differences(first, second)
    only = len(sides[0]) + len(sides[1]) - 2 * len(first)
    title = f"{places[0]} and {places[1]}: {len(first)} questions in common"
    notes = [*_settings(reports, places), _METHOD]
    if only:
        notes.insert(0, f"{only} questions that only one run has are left out")
    if as_json:
        shown = {"runs": list(places), "questions": len(first), "left_out": only}
        print(json.dumps({**shown, "metrics": [asdict(each) for each in found]}))
        return 0
    print(title)
    print_table(_table(found, places))
    for note in notes:
        print(note)
    return 0


def _paired(
    first: Sequence[ScoredCase], second: Sequence[ScoredCase]
) -> tuple[list[ScoredCase], list[ScoredCase]]:
    """The cases that both runs have. Raises CommandError if a case has another truth."""
    others = {each.key: each for each in second}
    pairs = [(each, others[each.key]) for each in first if each.key in others]
    for a, b in pairs:
        if (a.question, a.expected) != (b.question, b.expected):
            raise CommandError(
                f"the runs are of different data: {a.image!r}, row {a.row}, expects {a.expected[:60]!r} of "
                f"{a.question[:60]!r} in one, {b.expected[:60]!r} of {b.question[:60]!r} in the other"
            )
    return [a for a, _ in pairs], [b for _, b in pairs]


def _settings(reports: Sequence[Any], places: Sequence[str]) -> list[str]:
    """What the runs were made with, where they differ."""
    lines = []
    for name in ("models", "questions", "options", "weights", "data"):
        values = [report.get(name) for report in reports]
        if values[0] == values[1]:
            continue
        if all(isinstance(value, Mapping) for value in values):
            keys = [k for k in {**values[0], **values[1]} if values[0].get(k) != values[1].get(k)]
            values = [{key: value.get(key) for key in keys} for value in values]
        shown = (f"{json.dumps(v)} in {p}" for v, p in zip(values, places, strict=True))
        lines.append(f"{name}: {', '.join(shown)}")
    return lines


def _text(report: Any, name: str) -> str:
    value = report.get(name) if isinstance(report, Mapping) else None
    if not isinstance(value, str):
        raise CommandError(f"a {REPORT} is not the report of an evaluation")
    return value


def _table(found: Sequence[Difference], places: Sequence[str]) -> list[list[str]]:
    head = ["", "metric", "questions", *places, "difference", "95 % interval", "p"]
    rows = [head]
    for each in found:
        interval = "" if each.low is None else f"{_signed(each.low)} … {_signed(each.high)}"
        rows.append(
            [
                each.group,
                each.metric,
                str(each.cases),
                percent(each.first),
                percent(each.second),
                _signed(each.second - each.first),
                interval,
                _probability(each.bootstrap_p),
            ]
        )
    return rows


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.2f}"


def _probability(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
