"""Asks an engine what examples teach, and judges its answers.

An answer is right if it equals the taught one, without white space at the ends. A point is right if it lies within 5 %
of the image's width and height of a labelled point that no other point has taken, a box if its intersection over union
with such a box is at least 0.5. An example is right if all its objects are found and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine import InferenceEngine
from ..errors import ConfigError, RequestError
from ..requests.merging import edges_of, overlap
from ..types.events import EngineResult
from ..types.requests import Edges
from .data.examples import (
    BoxExample,
    CaptionExample,
    Example,
    Point,
    PointExample,
    QuestionExample,
    TaughtImage,
)

AT_ONCE = 4
"""Images whose questions run at the same time."""
NEAR = 0.05
LEAST_IOU = 0.5
RULES = (
    "An answer is right if it equals the taught one. A point is right within 5 % of the image's sides of a labelled "
    "point, a box from an intersection over union of 0.5. An example is right if all its objects are found, and no "
    "other."
)


@dataclass(slots=True)
class Score:
    """Examples of one kind. ``labelled``, ``found``, ``hits``: objects in the labels, in the results, and in both."""

    examples: int = 0
    right: int = 0
    labelled: int = 0
    found: int = 0
    hits: int = 0

    def add(self, other: Score) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


KINDS: Mapping[type[Example], str] = {
    QuestionExample: "answers",
    CaptionExample: "captions",
    PointExample: "points",
    BoxExample: "boxes",
}


async def judge(
    engine: InferenceEngine,
    images: Sequence[TaughtImage],
    adapter: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Score]:
    """Returns the score of each kind of example. Raises as `ask`."""
    questions = [(image.path, example) for image in images for example in image.examples]
    results = await ask(engine, questions, adapter, progress)
    scores: dict[str, Score] = {}
    for (_, example), result in zip(questions, results, strict=True):
        scores.setdefault(KINDS[type(example)], Score()).add(score(example, result.output))
    return scores


async def ask(
    engine: InferenceEngine,
    questions: Sequence[tuple[Path, Example]],
    adapter: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[EngineResult]:
    """Returns the greedy results for the prompts of examples, in order.

    Raises ConfigError, which names the image that a request fails for, and RuntimeFailure.
    """
    turns, done = asyncio.Semaphore(4 * AT_ONCE), 0
    settings: dict[str, Any] = {"temperature": 0.0}
    if adapter is not None:
        settings["adapter"] = adapter

    async def one(path: Path, example: Example) -> EngineResult:
        nonlocal done
        async with turns:
            try:
                result = await _call(engine, path, example, settings)
            except RequestError as error:
                raise ConfigError("data", path.name, str(error)) from error
        done += 1
        if progress is not None:
            progress(done, len(questions), "answers")
        return result

    return list(await asyncio.gather(*(one(path, example) for path, example in questions)))


async def _call(
    engine: InferenceEngine, path: Path, example: Example, settings: Mapping[str, Any]
) -> EngineResult:
    match example:
        case QuestionExample(question=question):
            return await engine.query(path, question, settings=settings)
        case CaptionExample(length=length):
            return await engine.caption(path, length, settings=settings)
        case PointExample(object=name):
            return await engine.point(path, name, settings=settings)
        case BoxExample(object=name):
            return await engine.detect(path, name, settings=settings)


def score(example: Example, output: Mapping[str, Any]) -> Score:
    """Judges the output of the example's skill."""
    match example:
        case QuestionExample(answer=answer):
            return Score(1, int(output["answer"].strip() == answer.strip()))
        case CaptionExample():
            return Score(1)
        case PointExample(points=points):
            found = points_of(output)
            return _objects(len(points), len(found), _hits(points, found, _nearness, 1 - NEAR))
        case BoxExample(boxes=boxes):
            edges = boxes_of(output)
            return _objects(len(boxes), len(edges), _hits(boxes, edges, overlap, LEAST_IOU))


def points_of(output: Mapping[str, Any]) -> list[Point]:
    return [(each["x"], each["y"]) for each in output["points"]]


def boxes_of(output: Mapping[str, Any]) -> list[Edges]:
    return [edges_of(box) for box in output["objects"]]


def _objects(labelled: int, found: int, hits: int) -> Score:
    return Score(1, int(hits == labelled == found), labelled, found, hits)


def _hits(
    labels: Sequence[Any], found: Sequence[Any], fit: Callable[[Any, Any], float], least: float
) -> int:
    """Returns the number of pairs that fit at least so well, the best pairs first; each is in one pair at most."""
    pairs = sorted(
        (
            (fit(label, each), i, j)
            for i, label in enumerate(labels)
            for j, each in enumerate(found)
        ),
        reverse=True,
    )
    left, right = set(range(len(labels))), set(range(len(found)))
    hits = 0
    for how_well, i, j in pairs:
        if how_well >= least and i in left and j in right:
            left.remove(i)
            right.remove(j)
            hits += 1
    return hits


def _nearness(a: Point, b: Point) -> float:
    return 1 - max(abs(a[0] - b[0]), abs(a[1] - b[1]))
