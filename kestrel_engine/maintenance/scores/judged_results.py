"""Asks an engine about labelled images, and judges every scored result by the labels.

A point is correct if it lies in the box of an object that no better point has; a box or an outline, if its box has an
intersection over union of at least 0.5 with that of such an object; an absence, if the labels have no such object.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...engine import InferenceEngine
from ...requests.merging import edges_of, overlap
from ...types.calibration import ABSENCE
from ...types.progress import Progress
from ...types.requests import Edges
from .fit import Judged
from .labelled_images import LabelledImage, Question

LEAST_IOU = 0.5
AT_ONCE = 4
"""Images whose questions run at the same time."""

ByCurve: TypeAlias = Mapping[str, Sequence[Judged]]
"""Judged results by curve (types/calibration.py)."""


def together(results: Sequence[ByCurve]) -> dict[str, list[Judged]]:
    whole: dict[str, list[Judged]] = defaultdict(list)
    for each in results:
        for name, judged in each.items():
            whole[name] += judged
    return whole


async def collect(
    engine: InferenceEngine,
    images: Sequence[LabelledImage],
    progress: Progress | None = None,
) -> list[ByCurve]:
    """Returns the results of each image, in order. ``progress`` is called after each image. Raises RuntimeFailure, and
    RequestError for an image that cannot be read."""
    turns, done = asyncio.Semaphore(AT_ONCE), 0

    async def one(image: LabelledImage) -> ByCurve:
        nonlocal done
        async with turns:
            answers = (_ask(engine, image, question) for question in image.questions)
            found = together(await asyncio.gather(*answers))
        done += 1
        if progress is not None:
            progress(done, len(images), "images")
        return found

    return list(await asyncio.gather(*(one(image) for image in images)))


async def _ask(engine: InferenceEngine, image: LabelledImage, question: Question) -> ByCurve:
    """Asks all skills about one object. An outline is about one object, so it needs a name of at most one."""
    found: dict[str, list[Judged]] = {}
    settings = {"min_score": 0.0}
    skills = ["point", "detect"]
    if "segment" in engine.info.skills and len(question.boxes) < 2:
        skills.append("segment")
    absence: list[Judged] = []
    for skill in skills:
        call = getattr(engine, skill)
        result = await call(image.path, question.name, settings=settings)
        output = result.output
        if skill == "segment":
            (segment,) = output["segments"]
            objects = [segment["bbox"]] if "bbox" in segment else []
        else:
            objects = output["points" if skill == "point" else "objects"]
        found[skill] = judge(objects, question.boxes)
        if result.absence is not None:
            absence.append((result.absence, not question.boxes))
    return {**found, ABSENCE: absence}


def judge(objects: Sequence[Mapping[str, float]], truth: Sequence[Edges]) -> list[Judged]:
    """Returns score and correctness of each object, best score first. Each box of ``truth`` is taken once."""
    left = list(truth)
    judged = []
    for found in sorted(objects, key=lambda each: each["score"], reverse=True):
        fits = _fits(found, left)
        best = max(range(len(left)), key=fits.__getitem__, default=-1)
        correct = best >= 0 and bool(fits[best] >= LEAST_IOU)
        if correct:
            del left[best]
        judged.append((found["score"], correct))
    return judged


def _fits(found: Mapping[str, float], boxes: Sequence[Edges]) -> Sequence[float]:
    """The intersection over union with each of ``boxes``; for a point, 1 if it lies in the box, else 0."""
    if "x" in found:
        x, y = found["x"], found["y"]
        return [float(x0 <= x <= x1 and y0 <= y <= y1) for x0, y0, x1, y1 in boxes]
    return [overlap(edges_of(found), box) for box in boxes]
