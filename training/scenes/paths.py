"""Segment paths: a shape's outline as the path tokens of the model."""

import numpy as np
from numpy.typing import NDArray

from training.scenes.scenes import Shape
from training.scenes.shapes import geometry, place

GRID_STEP = 16
GRID_VALUES: tuple[int, ...] = tuple(range(0, 961, GRID_STEP))
COMMANDS: tuple[str, ...] = ("M", "L", "C", "z")
_KAPPA = 0.5522847498

_near, _far = 480 * (1 - _KAPPA), 480 * (1 + _KAPPA)
_CIRCLE = ((480, 0), (_far, 0), (960, _near), (960, 480), (960, _far), (_far, 960), (480, 960),
           (_near, 960), (0, _far), (0, 480), (0, _near), (_near, 0), (480, 0))  # fmt: skip


def _grid(value: float) -> str:
    return str(min(max(round(value / GRID_STEP), 0), 60) * GRID_STEP)


def path_tokens(shape: Shape) -> list[str]:
    """Commands and integers in the 960-unit box of the shape's bounding box."""
    vertices = geometry(shape.kind).vertices
    if len(vertices) == 0:
        points = [_grid(v) for xy in _CIRCLE for v in xy]
        return ["M", *points[:2], "C", *points[2:], "z"]
    placed = place(vertices, shape.cx, shape.cy, shape.radius, shape.angle)
    x0, y0, x1, y1 = shape.box
    relative = (placed - (x0, y0)) / (x1 - x0, y1 - y0) * 960
    points = [_grid(v) for v in relative.reshape(-1)]
    return ["M", *points[:2], "L", *points[2:], "z"]


def outline(shape: Shape) -> NDArray[np.float64]:
    """The true outline [n, 2] in image pixels."""
    return place(geometry(shape.kind).outline, shape.cx, shape.cy, shape.radius, shape.angle)
