"""Average precision of scored boxes, as COCO defines it, by the package faster-coco-eval (extra ``evaluation``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .labelled_images import Edges

_SIDE = 1000
"""Pixels of an image's side, because COCO's tools expect pixels."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The boxes that were found for one name in one image, and those that are there."""

    name: str
    truth: tuple[Edges, ...]
    found: tuple[tuple[Edges, float], ...]
    """Each with its score."""


@dataclass(frozen=True, slots=True)
class AveragePrecision:
    """Means over names. ``mean``: also over ten IoUs from 0.5 to 0.95; ``at_50`` and ``at_75``: at one IoU."""

    mean: float
    at_50: float
    at_75: float


def average_precision(detections: Sequence[Detection]) -> AveragePrecision | None:
    """Returns the average precision of ``detections``, each of which counts as an image of its own.

    None if the package is not installed, or if no box is there.
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        return None
    names = {name: number for number, name in enumerate(sorted({d.name for d in detections}), 1)}
    truth: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for image, detection in enumerate(detections):
        place = {"image_id": image, "category_id": names[detection.name]}
        for box in detection.truth:
            pixels = _pixels(box)
            area = pixels[2] * pixels[3]
            truth.append(
                {**place, "id": len(truth) + 1, "bbox": pixels, "area": area, "iscrowd": 0}
            )
        found += [{**place, "bbox": _pixels(box), "score": score} for box, score in detection.found]
    if not truth:
        return None
    if not found:
        return AveragePrecision(0.0, 0.0, 0.0)
    labels = COCO(
        {
            "images": [{"id": i, "width": _SIDE, "height": _SIDE} for i in range(len(detections))],
            "annotations": truth,
            "categories": [{"id": number, "name": name} for name, number in names.items()],
        }
    )
    evaluation = COCOeval_faster(labels, labels.loadRes(found), iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return AveragePrecision(*(float(value) for value in evaluation.stats[:3]))


def _pixels(box: Edges) -> list[float]:
    """[x, y, width, height]."""
    x_min, y_min, x_max, y_max = (_SIDE * edge for edge in box)
    return [x_min, y_min, x_max - x_min, y_max - y_min]
