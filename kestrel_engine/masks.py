"""An outline drawn: SVG path data relative to a box becomes a mask of the picture, and the mask a file.

All SVG commands are understood (M L H V C S Q T A Z, absolute and relative); curves are flattened to within a quarter
of a pixel. A pixel is inside if its centre is, by the nonzero rule, which is SVG's default; open outlines are closed.
Like an SVG renderer, drawing stops at the first thing that is no path data and keeps what came before.

Memory is bounded: one byte a pixel for the mask (MAX_MASK_PIXELS at most) and a fixed band of rows while it is drawn.
Knows no request, engine or message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

import numpy as np
import pyvips

MAX_MASK_PIXELS = 16_000_000
"""Largest picture that a mask is drawn for, in pixels: 16 MB as a bool array."""

_BAND_PIXELS = 1_000_000
"""Pixels drawn at once: 4 MB of winding numbers."""

_BAND_CROSSINGS = 1_000_000
"""Most edge-and-row pairs looked at once, so that long paths make bands thinner, not memory larger."""

_FLATNESS = 0.25
"""Pixels that a flattened curve may be off."""

_MAX_SEGMENTS = 256
"""Lines that one curve becomes at most."""

Box = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max, as fractions of the picture."""

_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_NUMBER = re.compile(r"[\s,]*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_FLAG = re.compile(r"[\s,]*([01])")
_COMMAND = re.compile(r"([MmLlHhVvCcSsQqTtAaZz])([^MmLlHhVvCcSsQqTtAaZz]*)")
_SPACE = " \t\r\n\f,"

_Point = tuple[float, float]


def draw_mask(svg_path: str, box: Box, width: int, height: int) -> np.ndarray:
    """The filled outline: [height, width] bool.

    ``svg_path`` is relative to ``box``: (0, 0) is its upper left corner, (1, 1) its lower right one.
    Raises ValueError for a picture of more than MAX_MASK_PIXELS, or an empty one.
    """
    if width < 1 or height < 1 or width * height > MAX_MASK_PIXELS:
        raise ValueError(f"{width}x{height} pixels: a mask has 1 to {MAX_MASK_PIXELS}")
    edges = _edges(svg_path, box, width, height)
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


def mask_png(mask: np.ndarray) -> bytes:
    """A PNG file of [height, width] bool: one channel of 8 bits, 255 inside and 0 outside."""
    height, width = mask.shape
    pixels = np.where(mask, np.uint8(255), np.uint8(0))
    image = pyvips.Image.new_from_memory(pixels.data, width, height, 1, "uchar")
    return bytes(image.copy(interpretation="b-w").pngsave_buffer(compression=4))


def run_lengths(mask: np.ndarray) -> list[int]:
    """COCO's uncompressed counts of [height, width] bool: column by column, outside first (its first run may be 0)."""
    flat = mask.ravel(order="F")
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate(([0], starts, [flat.size]))).tolist()
    return [0, *counts] if flat[0] else counts


def svg_document(svg_path: str, box: Box, width: int, height: int) -> str:
    """An SVG document of the picture's size with the outline filled white on nothing."""
    x, y = box[0] * width, box[1] * height
    w, h = (box[2] - box[0]) * width, (box[3] - box[1]) * height
    transform = f"translate({x:.6g} {y:.6g}) scale({w:.6g} {h:.6g})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
        f'<path fill="white" transform="{transform}" d={quoteattr(svg_path)}/></svg>'
    )


def _band(edges: np.ndarray, first: int, last: int, width: int) -> np.ndarray:
    """Rows first..last-1: an edge changes the winding number of all pixels right of where it crosses a row's middle."""
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


def _edges(svg_path: str, box: Box, width: int, height: int) -> np.ndarray:
    """The outline in pixels: [num_edges, 4] float64 of x0, y0, x1, y1."""
    scale = ((box[2] - box[0]) * width, (box[3] - box[1]) * height)
    offset = (box[0] * width, box[1] * height)
    lines: list[tuple[float, float, float, float]] = []
    for polygon in _polygons(svg_path, max(abs(scale[0]), abs(scale[1]))):
        for (xa, ya), (xb, yb) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
            lines.append((xa, ya, xb, yb))
    edges = np.array(lines, np.float64).reshape(-1, 4) * [*scale, *scale] + [*offset, *offset]
    return edges[np.isfinite(edges).all(axis=1)]


def _polygons(svg_path: str, pixels: float) -> Iterator[list[_Point]]:
    """Each subpath as a polygon in the path's own units; ``pixels``: how many of them one unit is."""
    current: _Point = (0.0, 0.0)
    control: _Point | None = None
    previous = ""
    polygon: list[_Point] = []
    for letter, numbers in _commands(svg_path):
        kind = letter.upper()
        if kind == "Z":
            if polygon:
                current = polygon[0]
                yield polygon
            polygon, control, previous = [], None, kind
            continue
        target, points = _absolute(letter, numbers, current)
        if kind == "M":
            if polygon:
                yield polygon
            polygon = [target]
        else:
            polygon = polygon or [current]
        if kind in ("S", "T"):
            smooth = previous in (("C", "S") if kind == "S" else ("Q", "T"))
            reflected = _mirror(control, current) if smooth and control else current
            points = [reflected, *points]
        if kind in ("C", "S", "Q", "T"):
            polygon += _bezier([current, *points], pixels)
            control = points[-2]
        elif kind == "A":
            polygon += _arc(current, numbers, target, pixels)
        elif kind != "M":
            polygon.append(target)
        current, previous = target, kind
    if polygon:
        yield polygon


def _commands(svg_path: str) -> Iterator[tuple[str, list[float]]]:
    """Every command with one group of arguments; further groups come as commands of their own.

    Ends at the first thing that is no path data; a path that doesn't begin with M is none at all.
    """
    first = _COMMAND.search(svg_path)
    if first is None or first[1] not in "Mm" or svg_path[: first.start()].strip(_SPACE):
        return
    for command in _COMMAND.finditer(svg_path):
        letter, arguments = command[1], command[2]
        count = _ARGUMENTS[letter.upper()]
        position = 0
        while True:
            group: list[float] = []
            for index in range(count):
                pattern = _FLAG if count == 7 and index in (3, 4) else _NUMBER
                number = pattern.match(arguments, position)
                if number is None:
                    return
                group.append(float(number[1]))
                position = number.end()
            yield letter, group
            if not arguments[position:].strip(_SPACE):
                break
            if count == 0:
                return
            # More pairs after a move are lines.
            letter = {"M": "L", "m": "l"}.get(letter, letter)


def _absolute(letter: str, numbers: list[float], current: _Point) -> tuple[_Point, list[_Point]]:
    """Where the command ends, and its points (controls, then the end), in absolute coordinates."""
    kind = letter.upper()
    x, y = (0.0, 0.0) if letter.isupper() else current
    if kind == "H":
        end = (x + numbers[0], current[1])
    elif kind == "V":
        end = (current[0], y + numbers[0])
    elif kind == "A":
        end = (x + numbers[5], y + numbers[6])
    else:
        points = [(x + a, y + b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        return points[-1], points
    return end, [end]


def _mirror(point: _Point, centre: _Point) -> _Point:
    return (2 * centre[0] - point[0], 2 * centre[1] - point[1])


def _bezier(points: list[_Point], pixels: float) -> list[_Point]:
    """A quadratic or cubic curve as points after its first one. The bound on the error of n equal steps is the second
    differences' size times d(d-1)/8/n^2 for degree d (Wang's formula)."""
    p = np.array(points)
    degree = len(points) - 1
    bend = np.abs(p[2:] - 2 * p[1:-1] + p[:-2]).max() * pixels
    steps = _num_segments(math.sqrt(degree * (degree - 1) / 8 * bend / _FLATNESS))
    t = np.linspace(0, 1, steps + 1)[1:, None]
    curve = sum(
        math.comb(degree, i) * (1 - t) ** (degree - i) * t**i * p[i] for i in range(degree + 1)
    )
    return [(float(x), float(y)) for x, y in np.asarray(curve)]


def _arc(start: _Point, numbers: list[float], end: _Point, pixels: float) -> list[_Point]:
    """An elliptical arc as points after ``start``: SVG 1.1, appendix F.6 (endpoint to centre parametrisation)."""
    rx, ry, rotation, large, sweep = abs(numbers[0]), abs(numbers[1]), *numbers[2:5]
    if start == end:
        return []
    if rx == 0 or ry == 0:
        return [end]
    cos, sin = math.cos(math.radians(rotation)), math.sin(math.radians(rotation))
    dx, dy = (start[0] - end[0]) / 2, (start[1] - end[1]) / 2
    x1, y1 = cos * dx + sin * dy, cos * dy - sin * dx
    grow = math.sqrt(max(1.0, (x1 / rx) ** 2 + (y1 / ry) ** 2))
    rx, ry = rx * grow, ry * grow
    ratio = (x1 / rx) ** 2 + (y1 / ry) ** 2
    factor = math.sqrt(max(0.0, 1 / ratio - 1)) * (-1 if large == sweep else 1)
    cx, cy = factor * rx * y1 / ry, -factor * ry * x1 / rx
    theta = math.atan2((y1 - cy) / ry, (x1 - cx) / rx)
    turn = math.atan2((-y1 - cy) / ry, (-x1 - cx) / rx) - theta
    if sweep and turn < 0:
        turn += 2 * math.pi
    elif not sweep and turn > 0:
        turn -= 2 * math.pi
    # A chord over an angle a lies within r * a^2 / 8 of its arc.
    steps = _num_segments(abs(turn) * math.sqrt(max(rx, ry) * pixels / (8 * _FLATNESS)))
    angles = theta + turn * np.linspace(0, 1, steps + 1)[1:-1]
    x, y = cx + rx * np.cos(angles), cy + ry * np.sin(angles)
    xs = cos * x - sin * y + (start[0] + end[0]) / 2
    ys = sin * x + cos * y + (start[1] + end[1]) / 2
    return [*zip(xs.tolist(), ys.tolist(), strict=True), end]


def _num_segments(wanted: float) -> int:
    return min(_MAX_SEGMENTS, max(1, math.ceil(wanted))) if math.isfinite(wanted) else 1
