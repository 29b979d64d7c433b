"""Fills polygons: a pixel is inside if its centre is, by SVG's nonzero rule. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .svg_path import Polygon

_BAND_PIXELS = 1_000_000
"""Pixels per band: 4 MB of winding numbers."""
_BAND_CROSSINGS = 1_000_000
"""Most pairs of edge and row per band. Long paths get thinner bands instead of more memory."""


def fill(polygons: Sequence[Polygon], width: int, height: int) -> np.ndarray:
    """[height, width] bool. Corners are in pixels; open outlines are closed.

    An edge changes the winding number of all pixels to the right of the point where it crosses the middle of a row.
    Memory: one byte a pixel for the result, and a bounded amount besides.
    """
    edges = _edges(polygons)
    mask = np.zeros((height, width), bool)
    if not len(edges):
        return mask
    top = max(0, math.floor(min(edges[:, 1].min(), edges[:, 3].min())))
    bottom = min(height, math.ceil(max(edges[:, 1].max(), edges[:, 3].max())))
    rows = max(1, min(_BAND_PIXELS // width, _BAND_CROSSINGS // len(edges)))
    for first in range(top, bottom, rows):
        last = min(bottom, first + rows)
        mask[first:last] = _band(edges, first, last, width)
    return mask


def _edges(polygons: Sequence[Polygon]) -> np.ndarray:
    """[num_edges, 4] float64 of x0, y0, x1, y1."""
    lines = [
        (*a, *b)
        for polygon in polygons
        for a, b in zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    ]
    edges = np.array(lines, np.float64).reshape(-1, 4)
    return edges[np.isfinite(edges).all(axis=1)]


def _band(edges: np.ndarray, first: int, last: int, width: int) -> np.ndarray:
    """Rows first..last-1."""
    x0, y0, x1, y1 = edges.T
    middles = np.arange(first, last) + 0.5
    crossing = (np.minimum(y0, y1) <= middles[:, None]) & (middles[:, None] < np.maximum(y0, y1))
    row, edge = np.nonzero(crossing)
    x = x0[edge] + (middles[row] - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.intp)
    winding = np.zeros((last - first, width + 1), np.int32)
    np.add.at(winding, (row, column), np.where(y1[edge] > y0[edge], 1, -1))
    inside: np.ndarray = np.cumsum(winding[:, :width], axis=1) != 0
    return inside
