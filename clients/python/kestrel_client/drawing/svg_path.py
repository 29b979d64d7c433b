"""Converts SVG path data to polygons, by the grammar of SVG 1.1, section 8.3.

All commands are supported, absolute and relative, with implicit repetition. Curves and arcs are flattened to chords. As
the standard requires (appendix F.2), a path with an error is drawn up to the error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

Coordinate: TypeAlias = tuple[float, float]
Polygon: TypeAlias = list[Coordinate]

_FLATNESS = 0.25
"""Largest distance of a chord from its curve, in pixels."""
_MOST_CHORDS = 256
"""Largest number of chords of one curve or arc."""

_BLANK = r"[\s,]*"
_MOVETO = re.compile(f"{_BLANK}[Mm]")
_FURTHEST = 1e9
"""A larger number is an error: later products would overflow."""
_NUMBER = r"((?>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))"
_FLAG = "([01])"
"""A flag of an arc needs no separator: "01.5" is 0, 1, .5."""
_COMMAND = re.compile(f"{_BLANK}([MmZzLlHhVvCcSsQqTtAa]){_BLANK}")
_ARGUMENTS = {
    **{kind: [_NUMBER] * n for kind, n in zip("MLHVCSQT", (2, 2, 1, 1, 6, 4, 4, 2), strict=True)},
    "A": [*[_NUMBER] * 3, _FLAG, _FLAG, _NUMBER, _NUMBER],
}
_SETS = {
    kind: re.compile("".join(argument + _BLANK for argument in arguments))
    for kind, arguments in _ARGUMENTS.items()
}
"""One set of arguments of each command."""


def polygons(path: str, pixels: float = 1000.0) -> list[Polygon]:
    """Returns the corners of each subpath in order, without repeating the first. Omits subpaths of under 3 corners.

    ``pixels``: size of one unit of the path in pixels; it determines the number of chords of a curve.
    """
    pen = _Pen(pixels)
    for command, arguments in _segments(path):
        pen.apply(command, arguments)
    return [polygon for polygon in pen.subpaths if len(polygon) > 2]


def _segments(path: str) -> Iterator[tuple[str, list[float]]]:
    """Yields each command with one set of arguments, up to an error. Repeated sets become separate commands."""
    position = 0
    if not _MOVETO.match(path):
        return
    while match := _COMMAND.match(path, position):
        command, position = match[1], match.end()
        if command in "Zz":
            yield command, []
            continue
        found = _SETS[command.upper()].match(path, position)
        if found is None:
            return
        while found is not None:
            arguments = [float(number) for number in found.groups()]
            if max(map(abs, arguments)) > _FURTHEST:
                return
            yield command, arguments
            position = found.end()
            # Further pairs after a moveto are linetos.
            command = {"M": "L", "m": "l"}.get(command, command)
            found = _SETS[command.upper()].match(path, position)


class _Pen:
    """The position of the pen, and the subpaths drawn so far."""

    def __init__(self, pixels: float) -> None:
        self._pixels = pixels
        self.subpaths: list[Polygon] = []
        self.at: Coordinate = (0.0, 0.0)
        self.start: Coordinate = (0.0, 0.0)
        self.control: Coordinate | None = None
        """Last control point of the previous curve: S after C or S, and T after Q or T, reflect it."""
        self.previous = ""

    def apply(self, command: str, arguments: list[float]) -> None:
        kind = command.upper()
        x0, y0 = self.at if command.islower() else (0.0, 0.0)
        if kind == "Z":
            self.at = self.start
        elif kind == "A":
            self._arc(arguments, (x0 + arguments[5], y0 + arguments[6]))
        elif kind == "H":
            self._line((x0 + arguments[0], self.at[1]))
        elif kind == "V":
            self._line((self.at[0], y0 + arguments[0]))
        else:
            points = [
                (x0 + arguments[i], y0 + arguments[i + 1]) for i in range(0, len(arguments), 2)
            ]
            self._through(kind, points)
        if kind not in "CSQT":
            self.control = None
        self.previous = kind

    def _through(self, kind: str, points: list[Coordinate]) -> None:
        if kind == "M":
            self.at = self.start = points[0]
            self.subpaths.append([points[0]])
        elif kind == "L":
            self._line(points[0])
        elif kind in "CS":
            first = points[0] if kind == "C" else self._reflected("CS")
            self._curve([self.at, first, *points[-2:]])
        else:
            control = points[0] if kind == "Q" else self._reflected("QT")
            self._curve([self.at, control, points[-1]])

    def _reflected(self, kinds: str) -> Coordinate:
        """The previous control point mirrored at the pen; after any other command, the pen's position."""
        if self.control is None or self.previous not in kinds:
            return self.at
        return 2 * self.at[0] - self.control[0], 2 * self.at[1] - self.control[1]

    def _line(self, to: Coordinate) -> None:
        if self.previous == "Z":  # A command after closepath begins a new subpath at its end.
            self.subpaths.append([self.at])
        self.subpaths[-1].append(to)
        self.at = to

    def _curve(self, points: list[Coordinate]) -> None:
        """Draws a quadratic or cubic Bézier curve. The first of its control ``points`` is the pen's position.

        The distance of n equal chords from a curve of degree d is at most d(d-1)/8/n^2 times the largest second
        difference of the points (Wang's formula).
        """
        degree = len(points) - 1
        bend = max(
            math.hypot(a[0] - 2 * b[0] + c[0], a[1] - 2 * b[1] + c[1])
            for a, b, c in zip(points, points[1:], points[2:], strict=False)
        )
        wanted = math.sqrt(degree * (degree - 1) / 8 * bend * self._pixels / _FLATNESS)
        chords = _num_chords(wanted)
        for step in range(1, chords + 1):
            self._line(_at(points, step / chords))
            self.previous = "C"
        self.control = points[-2]

    def _arc(self, arguments: list[float], end: Coordinate) -> None:
        """SVG 1.1, appendix F.6: from endpoints to the ellipse's centre and angles."""
        rx, ry, turn, large, sweep = abs(arguments[0]), abs(arguments[1]), *arguments[2:5]
        (x1, y1), (x2, y2) = self.at, end
        if min(rx, ry) < 1 / _FURTHEST or self.at == end:
            self._line(end)
            return
        cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        dx, dy = (x1 - x2) / 2, (y1 - y2) / 2
        u, v = cos * dx + sin * dy, -sin * dx + cos * dy
        scale = max(1.0, math.hypot(u / rx, v / ry))  # radii too small to reach are scaled up
        rx, ry = rx * scale, ry * scale
        rest = (rx * ry) ** 2 - (rx * v) ** 2 - (ry * u) ** 2
        factor = math.sqrt(max(0.0, rest) / ((rx * v) ** 2 + (ry * u) ** 2))
        if large == sweep:
            factor = -factor
        cu, cv = factor * rx * v / ry, -factor * ry * u / rx
        cx, cy = cos * cu - sin * cv + (x1 + x2) / 2, sin * cu + cos * cv + (y1 + y2) / 2
        begin = math.atan2((v - cv) / ry, (u - cu) / rx)
        extent = math.atan2((-v - cv) / ry, (-u - cu) / rx) - begin
        if sweep and extent < 0:
            extent += 2 * math.pi
        elif not sweep and extent > 0:
            extent -= 2 * math.pi
        # A chord over an angle a lies within r * a^2 / 8 of its arc.
        wanted = abs(extent) * math.sqrt(max(rx, ry) * self._pixels / (8 * _FLATNESS))
        chords = _num_chords(wanted)
        for i in range(1, chords):
            a = begin + extent * i / chords
            p, q = rx * math.cos(a), ry * math.sin(a)
            self._line((cx + cos * p - sin * q, cy + sin * p + cos * q))
            self.previous = "A"
        self._line(end)


def _at(points: list[Coordinate], t: float) -> Coordinate:
    """The point of a Bézier curve at ``t`` (de Casteljau)."""
    while len(points) > 1:
        points = [(a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t) for a, b in pairwise(points)]
    return points[0]


def _num_chords(wanted: float) -> int:
    """An even number, so that the middle of a curve is a corner."""
    if not math.isfinite(wanted):
        return 2
    return min(_MOST_CHORDS, 2 * max(1, math.ceil(wanted / 2)))
