"""Scores of places: boxes by their intersection over union, and points in outlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark import Outcome
from .records import Edges


def found_boxes(outcome: Outcome) -> list[tuple[Edges, float]]:
    """The boxes of a result as fractions of the image, with their scores, best first; 1 for boxes without one."""
    boxes = [(edges_of(box), float(box.get("score", 1.0))) for box in outcome.get("objects", ())]
    return sorted(boxes, key=lambda pair: -pair[1])


def edges_of(box: Mapping[str, Any]) -> Edges:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]


def size_of(outcome: Outcome) -> tuple[int, int]:
    """Width and height of the image that a result is about; (1, 1) if they are unknown."""
    size = outcome.get("image_size")
    return (size["width"], size["height"]) if size else (1, 1)


def to_pixels(edges: Edges, size: tuple[float, float]) -> Edges:
    width, height = size
    return edges[0] * width, edges[1] * height, edges[2] * width, edges[3] * height


def iou(a: Edges, b: Edges) -> float:
    """Intersection over union of two boxes."""
    across = min(a[2], b[2]) - max(a[0], b[0])
    down = min(a[3], b[3]) - max(a[1], b[1])
    if across <= 0 or down <= 0:
        return 0.0
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return across * down / (both - across * down)


def matched(truth: Sequence[Edges], found: Sequence[Edges], least: float = 0.5) -> list[float]:
    """The IoUs of one-to-one matches of at least ``least``, best first."""
    pairs = sorted(
        ((iou(t, f), i, j) for i, t in enumerate(truth) for j, f in enumerate(found)), reverse=True
    )
    used: set[tuple[str, int]] = set()
    ious = []
    for value, i, j in pairs:
        if value >= least and not used & {("truth", i), ("found", j)}:
            used |= {("truth", i), ("found", j)}
            ious.append(value)
    return ious


def in_polygon(x: float, y: float, polygon: Sequence[tuple[float, float]]) -> bool:
    """Whether a point is in a polygon, by the even-odd rule."""
    crossed = False
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        if (y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0:
            crossed = not crossed
    return crossed
