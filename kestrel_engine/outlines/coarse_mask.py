"""Draws the path of a segment as a square mask of a region.

A path has the form that ``skills.objects.svg_path`` writes: commands and pairs of numbers, separated by single spaces.
The coordinates are relative to the segment's box. This module draws as the refiner's reference does.
"""

from __future__ import annotations

import numpy as np

from ..types.requests import Edges
from .region import Region

SAMPLES = 2
"""Samples of a pixel along each axis, as in the reference, which draws at twice the size."""
CHORDS = 16
"""Chords of a curve. The grid of the model's numbers is coarser than the error."""

Point = tuple[float, float]

_PAIRS = {"M": 1, "L": 1, "T": 1, "S": 2, "Q": 2, "C": 3}
_NUM_ARGUMENTS = {**{command: 2 * pairs for command, pairs in _PAIRS.items()}, "H": 1, "V": 1}


def draw(path: str, box: Edges, region: Region, side: int) -> np.ndarray:
    """Returns [side, side] uint8, 1 where at least half of a pixel's samples lie inside the path (nonzero rule).

    As in SVG, a path with an error counts up to the error. An arc is an error, because the model's numbers come in
    pairs, and an arc has seven.
    """
    points = side * SAMPLES
    sx, sy = points / region.width, points / region.height
    scaled = [
        np.array(
            [
                (
                    (box[0] + u * (box[2] - box[0]) - region.x_min) * sx,
                    (box[1] + v * (box[3] - box[1]) - region.y_min) * sy,
                )
                for u, v in polygon
            ]
        )
        for polygon in flatten(path)
    ]
    inside = fill(scaled, points)
    counts = inside.reshape(side, SAMPLES, side, SAMPLES).sum((1, 3))
    mask: np.ndarray = (2 * counts >= SAMPLES * SAMPLES).astype(np.uint8)
    return mask


def flatten(path: str) -> list[list[Point]]:
    """Returns the corners of each subpath, in the path's coordinates. Curves become chords."""
    pen = _Pen()
    command, numbers = "", list[float]()
    for word in [*path.split(), ""]:
        if word and not word.isalpha():
            numbers.append(float(word))
            continue
        if command and not pen.run(command, numbers):
            break
        command, numbers = word, []
    return [polygon for polygon in pen.polygons if len(polygon) > 2]


class _Pen:
    def __init__(self) -> None:
        self.polygons: list[list[Point]] = []
        self._at = self._start = (0.0, 0.0)
        self._control: tuple[str, Point] | None = None
        """The last curve's degree, "C" or "Q", and its last control point, which S or T reflects."""
        self._closed = False

    def run(self, command: str, numbers: list[float]) -> bool:
        """Draws a command with all its arguments. Returns False at an error."""
        kind = command.upper()
        if not self.polygons and kind != "M":
            return False
        if kind == "Z":
            self._at, self._control, self._closed = self._start, None, True
            return not numbers
        size = _NUM_ARGUMENTS.get(kind)
        if size is None:
            return False
        sets = [numbers[i : i + size] for i in range(0, len(numbers) - size + 1, size)]
        for arguments in sets:
            self._apply(kind, command.islower(), arguments)
            kind = "L" if kind == "M" else kind
        return bool(sets) and len(numbers) % size == 0

    def _apply(self, kind: str, relative: bool, numbers: list[float]) -> None:
        x, y = self._at if relative else (0.0, 0.0)
        if kind in "HV":
            to = (x + numbers[0], self._at[1]) if kind == "H" else (self._at[0], y + numbers[0])
            points = [to]
        else:
            points = [(x + u, y + v) for u, v in zip(numbers[::2], numbers[1::2], strict=True)]
        if kind == "M":
            self.polygons.append([points[0]])
            self._at = self._start = points[0]
            self._control, self._closed = None, False
            return
        if self._closed:  # A command after closepath begins a new subpath at its end.
            self.polygons.append([self._at])
            self._closed = False
        if kind in "LHV":
            self.polygons[-1].append(points[0])
            self._control = None
        else:
            degree = "C" if kind in "CS" else "Q"
            if kind in "ST":
                points = [self._reflected(degree), *points]
            self._curve(np.array([self._at, *points]))
            self._control = (degree, points[-2])
        self._at = points[-1]

    def _reflected(self, degree: str) -> Point:
        if self._control is None or self._control[0] != degree:
            return self._at
        x, y = self._control[1]
        return 2 * self._at[0] - x, 2 * self._at[1] - y

    def _curve(self, controls: np.ndarray) -> None:
        t = np.linspace(0, 1, CHORDS + 1)[1:, None, None]
        points = np.broadcast_to(controls, (CHORDS, *controls.shape))
        while points.shape[1] > 1:  # De Casteljau.
            points = points[:, :-1] * (1 - t) + points[:, 1:] * t
        self.polygons[-1] += [(float(x), float(y)) for x, y in points[:, 0]]


def fill(polygons: list[np.ndarray], side: int) -> np.ndarray:
    """Returns [side, side] bool by the nonzero rule. A pixel is inside if its centre is. Corners are in pixels."""
    edges = [np.hstack([polygon, np.roll(polygon, -1, axis=0)]) for polygon in polygons]
    x0, y0, x1, y1 = np.concatenate(edges).T if edges else np.empty((4, 0))
    middles = (np.arange(side) + 0.5)[:, None]
    crossed = (np.minimum(y0, y1) <= middles) & (middles < np.maximum(y0, y1))
    row, edge = np.nonzero(crossed)
    x = x0[edge] + (row + 0.5 - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
    # An edge changes the winding number of all pixels to the right of it.
    column = np.clip(np.ceil(x - 0.5), 0, side).astype(np.intp)
    winding = np.zeros((side, side + 1), np.int32)
    np.add.at(winding, (row, column), np.where(y1[edge] > y0[edge], 1, -1))
    inside: np.ndarray = np.cumsum(winding[:, :side], axis=1) != 0
    return inside
