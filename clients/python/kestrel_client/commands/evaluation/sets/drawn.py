"""Sets that this package has itself: drawn shapes, printed texts, charts, icons and screens.

Rows: ``requests``, a list of objects with ``skill``, ``kind``, ``text`` (question or object), and what is right:
``answer`` and perhaps ``metric``; or ``boxes``, and perhaps ``outlines``. ``refs``: points and boxes to ask about. All
coordinates are fractions of the image. training/held_out.py draws them and writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..answers import TEXTS, Truth, score
from ..benchmark import Asking, Benchmark, Case, Outcome, Score, SetMetrics
from ..records import Record, is_number
from ..scored import AnsweredCase

_FOLDER = Path(__file__).parent / "drawn"
_SKILLS = ("query", "point", "detect", "segment")
_TITLES = {
    "scenes": "Scenes of drawn shapes",
    "text": "Printed text",
    "charts": "Charts",
    "icons": "Icons",
    "screens": "Screens",
}


def _cases(record: Record, asking: Asking) -> list[Case]:
    wanted = asking.skills or _SKILLS
    cases = []
    for request in record.rows("requests"):
        one = record.within(request)
        truth = read_truth(one)
        if truth.skill in wanted:
            cases.append(_case(one, truth, asking))
    return cases


def read_truth(request: Record) -> Truth:
    """What is right for a request of a row. Raises CommandError."""
    skill = request.text("skill")
    if skill not in _SKILLS:
        request.refuse("skill", skill, f"one of {', '.join(_SKILLS)}")
    metric = request.text("metric") if request.has("metric") else TEXTS[0]
    if metric not in TEXTS:
        request.refuse("metric", metric, f"one of {', '.join(TEXTS)}")
    answer = request.text("answer") if skill == "query" else ""
    boxes = [(a, b, c, d) for a, b, c, d in _numbers(request, "boxes", 4)]
    outlines = [
        list(zip(line[::2], line[1::2], strict=True)) for line in _numbers(request, "outlines", 0)
    ]
    if len(outlines) not in (0, len(boxes)):
        request.refuse("outlines", outlines, f"one for each of the {len(boxes)} boxes, or none")
    return Truth(skill=skill, metric=metric, answer=answer, boxes=boxes, outlines=outlines)


def _numbers(request: Record, name: str, *counts: int) -> list[list[float]]:
    """A list of lists of numbers, each as long as one of ``counts``; 0: x and y of three corners or more in turn."""
    found: list[list[float]] = []
    value = request.values.get(name) or []
    for each in value if isinstance(value, list) else [value]:
        is_list = isinstance(each, list) and all(map(is_number, each))
        if not is_list or (
            len(each) not in counts and (0 not in counts or len(each) < 6 or len(each) % 2)
        ):
            long = " or ".join(map(str, counts)) if 0 not in counts else "6 or more, in pairs,"
            request.refuse(name, each, f"a list of {long} numbers")
        found.append([float(number) for number in each])
    return found


def _case(request: Record, truth: Truth, asking: Asking) -> Case:
    text, refs = request.text("text"), _numbers(request, "refs", 2, 4)
    task: Any
    if truth.skill == "query":
        task = replace(asking.query(text), spatial_refs=refs)
    else:
        task = asking.find(truth.skill, text)
    count = len(truth.boxes)
    return Case(
        task=task,
        truth=truth,
        question=text,
        expected=truth.answer or f"{count or 'nothing'} in the image",
        group=request.text("kind") if request.has("kind") else truth.skill,
    )


def _score(case: Case, outcome: Outcome | None) -> Score:
    return score(case.truth, outcome)


def _whole(answered: Sequence[AnsweredCase]) -> SetMetrics:
    return SetMetrics(
        {"mean score": sum(each.scored.value for each in answered) / max(1, len(answered))}
    )


BENCHMARKS = {
    name: Benchmark(
        name=name,
        title=title,
        source="training/README.md",
        skills=_SKILLS if name == "scenes" else _SKILLS[:3],
        cases=_cases,
        score=_score,
        whole=_whole,
        built_in=_FOLDER / name,
    )
    for name, title in _TITLES.items()
}
