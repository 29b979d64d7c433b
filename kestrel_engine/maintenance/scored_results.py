"""Asks an engine about labelled images, and judges every scored result by the labels.

A point is correct if it lies in the box of an object that no better point has. A box or an outline is correct if its
box has an intersection over union of at least 0.5 with that of such an object. The absence of an object is correct if
the labels have no such object.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..engine import InferenceEngine
from ..types.calibration import ABSENCE
from ..types.progress import Progress
from .average_precision import Detection
from .labelled_images import Edges, LabelledImage, Question
from .score_fit import Judged

LEAST_IOU = 0.5
AT_ONCE = 4
"""Images whose questions run at the same time."""


@dataclass(frozen=True, slots=True)
class Results:
    """The judged results by curve (types/calibration.py), and what was detected."""

    judged: dict[str, list[Judged]] = field(default_factory=lambda: defaultdict(list))
    detections: list[Detection] = field(default_factory=list)

    def add(self, other: Results) -> None:
        for name, results in other.judged.items():
            self.judged[name] += results
        self.detections.extend(other.detections)


async def collect(
    engine: InferenceEngine,
    images: Sequence[LabelledImage],
    progress: Progress | None = None,
) -> list[Results]:
    """Returns the results of each image, in order. ``progress`` is called after each image.

    Raises RequestError for an image that cannot be read, and RuntimeFailure.
    """
    turns, done = asyncio.Semaphore(AT_ONCE), 0

    async def one(image: LabelledImage) -> Results:
        nonlocal done
        async with turns:
            found = Results()
            for part in await asyncio.gather(
                *(_ask(engine, image, question) for question in image.questions)
            ):
                found.add(part)
        done += 1
        if progress is not None:
            progress(done, len(images), "images")
        return found

    return list(await asyncio.gather(*(one(image) for image in images)))


async def _ask(engine: InferenceEngine, image: LabelledImage, question: Question) -> Results:
    """Asks all skills about one object. An outline is about one object, so it needs a name of at most one."""
    found = Results()
    settings = {"min_score": 0.0}
    skills = ["point", "detect"]
    if "segment" in engine.info.skills and len(question.boxes) < 2:
        skills.append("segment")
    for skill in skills:
        call = getattr(engine, skill)
        result = await call(image.path, question.name, settings=settings)
        output = result.output
        if skill == "segment":
            (segment,) = output["segments"]
            objects = [segment["bbox"]] if "bbox" in segment else []
        else:
            objects = output["points" if skill == "point" else "objects"]
        found.judged[skill] += judge(objects, question.boxes)
        if skill == "detect":
            boxes = tuple((_edges(each), each["score"]) for each in objects)
            found.detections.append(Detection(question.name, question.boxes, boxes))
        if result.absence is not None:
            found.judged[ABSENCE].append((result.absence, not question.boxes))
    return found


def _edges(box: Mapping[str, float]) -> Edges:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]


def judge(objects: Sequence[Mapping[str, float]], truth: Sequence[Edges]) -> list[Judged]:
    """Returns score and correctness of each object, best score first. Each box of ``truth`` is taken once."""
    left = list(truth)
    judged = []
    for found in sorted(objects, key=lambda each: each["score"], reverse=True):
        fits = [_fit(found, box) for box in left]
        best = max(range(len(left)), key=fits.__getitem__, default=-1)
        correct = best >= 0 and fits[best] >= LEAST_IOU
        if correct:
            del left[best]
        judged.append((found["score"], correct))
    return judged


def _fit(found: Mapping[str, float], box: Edges) -> float:
    """The intersection over union of two boxes; for a point, 1 if it lies in the box, else 0."""
    x_min, y_min, x_max, y_max = box
    if "x" in found:
        return float(x_min <= found["x"] <= x_max and y_min <= found["y"] <= y_max)
    width = min(x_max, found["x_max"]) - max(x_min, found["x_min"])
    height = min(y_max, found["y_max"]) - max(y_min, found["y_min"])
    if width <= 0 or height <= 0:
        return 0.0
    own = (found["x_max"] - found["x_min"]) * (found["y_max"] - found["y_min"])
    return width * height / (own + (x_max - x_min) * (y_max - y_min) - width * height)
