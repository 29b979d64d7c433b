"""Fills polygons, exactly and without any library: a pixel is inside if its centre is."""

from __future__ import annotations

import math
from collections import defaultdict

from .svg_path import Polygon

INSIDE = 255


def fill(polygons: list[Polygon], width: int, height: int) -> bytes:
    """``width * height`` bytes row by row, 255 inside and 0 outside; corners are in pixels.

    Follows SVG's nonzero rule, so that an inner outline of the other direction is a hole. Scanline conversion (Foley,
    van Dam, Feiner, Hughes, Computer Graphics, section 3.6) with crossings taken at the centres of rows.
    """
    crossings: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for polygon in polygons:
        for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
            if y0 == y1:
                continue
            turn = 1 if y0 < y1 else -1
            slope = (x1 - x0) / (y1 - y0)
            first = max(0, math.ceil(min(y0, y1) - 0.5))
            last = min(height, math.ceil(max(y0, y1) - 0.5))
            for row in range(first, last):
                crossings[row].append((x0 + (row + 0.5 - y0) * slope, turn))
    pixels = bytearray(width * height)
    for row, found in crossings.items():
        found.sort()
        winding, begin = 0, 0
        for x, turn in found:
            column = min(max(math.ceil(x - 0.5), 0), width)
            if winding and column > begin:
                start = row * width
                pixels[start + begin : start + column] = bytes([INSIDE]) * (column - begin)
            winding, begin = winding + turn, column
    return bytes(pixels)
