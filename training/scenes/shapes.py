"""Canonical geometry of the ten shapes: outlines, true vertices, the point a user would click, areas.

All in a local frame with y down and a radius of about one; ``training.scenes.render`` holds the matching signed
distances.  A vertex list starts at a fixed place of the shape and runs clockwise as seen on screen.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from training.scenes.vocabulary import SHAPES

Array = NDArray[np.float64]
Points = list[tuple[float, float]]

SQUARE_HALF = 0.88
DIAMOND_X, DIAMOND_Y = 0.78, 1.0
TRIANGLE_TOP, TRIANGLE_BASE = -0.93, 0.87
STAR_INNER = 0.46
CROSS_LENGTH, CROSS_HALF = 0.95, 0.32
HEART_D, HEART_SHIFT = 0.8, 0.08
CRESCENT_OUTER, CRESCENT_INNER, CRESCENT_OFFSET = 0.95, 0.8, 0.45
SEMICIRCLE_R, SEMICIRCLE_Y = 0.98, 0.45
ARROW_NECK, ARROW_SHAFT, ARROW_HEAD = 0.1, 0.26, 0.72


@dataclass(frozen=True)
class Geometry:
    """One canonical shape.

    outline: [n, 2] dense closed polygon; vertices: [m, 2] what a path lists (a circle has none and is
    written as four curves); anchor: a point well inside; area: of the outline.
    """

    outline: Array
    vertices: Array
    anchor: tuple[float, float]
    area: float


def _arc(cx: float, cy: float, r: float, start: float, end: float, steps: int) -> Points:
    """Points on an arc, both ends included; angles in degrees, 0 = right, 90 = down.

    Inner points stand a little outside the arc, so that the polygon has the arc's area.
    """
    angles = np.radians(np.linspace(start, end, steps + 1))
    step = math.radians(abs(end - start)) / steps
    radii = np.full(steps + 1, r * math.sqrt(step / math.sin(step)))
    radii[[0, -1]] = r
    return [
        (cx + q * math.cos(a), cy + q * math.sin(a)) for q, a in zip(radii, angles, strict=True)
    ]


def _heart(steps: int) -> Points:
    half, r = HEART_D / 2, HEART_D / math.sqrt(2)
    y = HEART_SHIFT - half
    left = _arc(-half, y, r, 135, 315, steps)
    right = _arc(half, y, r, 225, 405, steps)
    return [(0.0, HEART_D + HEART_SHIFT), *left, *right[1:]]


def _crescent(outer_steps: int, inner_steps: int) -> Points:
    x = (CRESCENT_OUTER**2 - CRESCENT_INNER**2 + CRESCENT_OFFSET**2) / (2 * CRESCENT_OFFSET)
    y = math.sqrt(CRESCENT_OUTER**2 - x * x)
    outer = math.degrees(math.atan2(y, x))
    inner = math.degrees(math.atan2(y, x - CRESCENT_OFFSET))
    left = _arc(0, 0, CRESCENT_OUTER, outer, 360 - outer, outer_steps)
    back = _arc(CRESCENT_OFFSET, 0, CRESCENT_INNER, 360 - inner, inner, inner_steps)
    return [*left, *back[1:-1]]


def _star() -> Points:
    corners = (((1.0, STAR_INNER)[i % 2], math.radians(36 * i - 90)) for i in range(10))
    return [(r * math.cos(a), r * math.sin(a)) for r, a in corners]


def _cross() -> Points:
    a, b = CROSS_HALF, CROSS_LENGTH
    half = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)]
    return half + [(-x, -y) for x, y in half]


def _vertices(shape: str, dense: bool) -> Points:
    match shape:
        case "circle":
            return _arc(0, 0, 1, -90, 270, 72)[:-1] if dense else []
        case "square":
            s = SQUARE_HALF
            return [(-s, -s), (s, -s), (s, s), (-s, s)]
        case "triangle":
            return [(0, TRIANGLE_TOP), (1, TRIANGLE_BASE), (-1, TRIANGLE_BASE)]
        case "diamond":
            return [(0, -DIAMOND_Y), (DIAMOND_X, 0), (0, DIAMOND_Y), (-DIAMOND_X, 0)]
        case "star":
            return _star()
        case "cross":
            return _cross()
        case "heart":
            return _heart(24 if dense else 6)
        case "crescent":
            return _crescent(36, 24) if dense else _crescent(12, 8)
        case "arrow":
            s, h, n = ARROW_SHAFT, ARROW_HEAD, ARROW_NECK
            return [(1, 0), (n, h), (n, s), (-1, s), (-1, -s), (n, -s), (n, -h)]
        case "semicircle":
            return _arc(0, SEMICIRCLE_Y, SEMICIRCLE_R, 180, 360, 40 if dense else 8)
    raise ValueError(shape)


_ANCHORS = {
    "triangle": (0, 0.2), "heart": (0, -0.05), "crescent": (-0.65, 0), "semicircle": (0, 0.02),
}  # fmt: skip


def polygon_area(points: Array) -> float:
    """Area of a closed polygon [n, 2]."""
    x, y = points[:, 0], points[:, 1]
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


@cache
def geometry(kind: int) -> Geometry:
    """The canonical geometry of shape number ``kind``."""
    shape = SHAPES[kind]
    outline = np.array(_vertices(shape, dense=True), dtype=np.float64)
    vertices = np.array(_vertices(shape, dense=False), dtype=np.float64).reshape(-1, 2)
    return Geometry(outline, vertices, _ANCHORS.get(shape, (0.0, 0.0)), polygon_area(outline))


def place(points: Array, cx: float, cy: float, radius: float, angle: float) -> Array:
    """Turn, scale and move local points [n, 2] into the image."""
    c, s = math.cos(angle) * radius, math.sin(angle) * radius
    x, y = points[:, 0], points[:, 1]
    return np.stack([cx + c * x - s * y, cy + s * x + c * y], axis=1)


def unit_bounds(kind: int, angle: float) -> tuple[float, float, float, float]:
    """Bounds (x0, y0, x1, y1) of the shape at the origin with radius one, turned by ``angle`` radians."""
    points = place(geometry(kind).outline, 0, 0, 1, angle)
    (x0, y0), (x1, y1) = points.min(0).tolist(), points.max(0).tolist()
    return x0, y0, x1, y1


# Quarter turns a shape may be drawn in, and its extra tilt in degrees; a square may not become a diamond.
QUARTERS = {"triangle": (0, 2), **dict.fromkeys(("crescent", "arrow", "semicircle"), (0, 1, 2, 3))}
TILT: dict[str, float] = {"circle": 0.0, "square": 9.0, "diamond": 9.0, "cross": 10.0}
DEFAULT_TILT = 13.0

# Half the thickness of the thinnest part: an outline's stroke must leave a hole in it.
LIMB = {"cross": 0.32, "arrow": 0.26, "crescent": 0.3, "star": 0.36, "semicircle": 0.43}
