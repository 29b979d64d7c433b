"""SVG path data to polygons, by the grammar of SVG 1.1, section 8.3. Pure arithmetic; knows no picture.

All commands, absolute and relative, with implicit repetition; curves and arcs are flattened to chords. As the standard
asks (appendix F.2), a path with an error is drawn up to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

Coordinate: TypeAlias = tuple[float, float]
Polygon: TypeAlias = list[Coordinate]

_CURVE_CHORDS = 24
"""Chords a Bézier curve: at a box of 1,000 pixels they stay within half a pixel of the curve."""
_ARC_CHORD_RADIANS = math.pi / 24

_SEPARATOR = re.compile(r"[\s,]*")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_COMMAND = re.compile(r"[MmZzLlHhVvCcSsQqTtAa]")


def polygons(path: str) -> list[Polygon]:
    """The path's subpaths as corners in order, without repeating the first; fewer than 3 corners are left out."""
    pen = _Pen()
    try:
        for command, arguments in _segments(path):
            pen.apply(command, arguments)
    except _PathEnd:
        pass
    return [polygon for polygon in pen.subpaths if len(polygon) > 2]


class _PathEnd(Exception):
    """The data is malformed from here on."""


_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}


def _segments(path: str) -> Iterator[tuple[str, list[float]]]:
    """Every command with one set of its arguments; repeated sets come as commands of their own."""
    position = _skip(path, 0)
    while position < len(path):
        match = _COMMAND.match(path, position)
        if match is None:
            raise _PathEnd
        command, position = match.group(), _skip(path, match.end())
        if command in "Zz":
            yield command, []
            continue
        count = _ARGUMENTS[command.upper()]
        first = True
        while first or (position < len(path) and not _COMMAND.match(path, position)):
            arguments = []
            for i in range(count):
                # The two flags of an arc may stand without anything between them: "01.5" is 0, 1, .5.
                is_flag = command in "Aa" and i in (3, 4)
                value, position = _number(path, position, flag=is_flag)
                arguments.append(value)
            yield command, arguments
            first = False
            # Further pairs after a moveto are linetos.
            command = {"M": "L", "m": "l"}.get(command, command)


def _skip(path: str, position: int) -> int:
    match = _SEPARATOR.match(path, position)
    assert match is not None
    return match.end()


def _number(path: str, position: int, *, flag: bool) -> tuple[float, int]:
    if flag:
        if path[position : position + 1] not in ("0", "1"):
            raise _PathEnd
        return float(path[position]), _skip(path, position + 1)
    match = _NUMBER.match(path, position)
    if match is None:
        raise _PathEnd
    return float(match.group()), _skip(path, match.end())


class _Pen:
    """The state of drawing: where the pen is, and what it drew."""

    def __init__(self) -> None:
        self.subpaths: list[Polygon] = []
        self.at: Coordinate = (0.0, 0.0)
        self.start: Coordinate = (0.0, 0.0)
        self.control: Coordinate | None = None
        """Last control point of the curve just drawn, for S after C or S and T after Q or T."""
        self.previous = ""

    def apply(self, command: str, arguments: list[float]) -> None:
        kind = command.upper()
        if self.previous == "" and kind != "M":
            raise _PathEnd  # a path begins with a moveto
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
            second, end = points[-2:]
            self._curve(_cubic(self.at, first, second, end), second)
        else:
            control = points[0] if kind == "Q" else self._reflected("QT")
            self._curve(_quadratic(self.at, control, points[-1]), control)

    def _reflected(self, kinds: str) -> Coordinate:
        """The control point before, mirrored at the pen; the pen itself after any other command."""
        if self.control is None or self.previous not in kinds:
            return self.at
        return 2 * self.at[0] - self.control[0], 2 * self.at[1] - self.control[1]

    def _line(self, to: Coordinate) -> None:
        if (
            self.previous == "Z"
        ):  # drawing on after a closepath begins a new subpath where that ended
            self.subpaths.append([self.at])
        self.subpaths[-1].append(to)
        self.at = to

    def _curve(self, position: Callable[[float], Coordinate], control: Coordinate) -> None:
        for i in range(1, _CURVE_CHORDS + 1):
            self._line(position(i / _CURVE_CHORDS))
            self.previous = "C"
        self.control = control

    def _arc(self, arguments: list[float], end: Coordinate) -> None:
        """SVG 1.1, appendix F.6: from endpoints to the ellipse's centre and angles."""
        rx, ry, turn, large, sweep = abs(arguments[0]), abs(arguments[1]), *arguments[2:5]
        (x1, y1), (x2, y2) = self.at, end
        if rx == 0 or ry == 0 or self.at == end:
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
        chords = max(2, math.ceil(abs(extent) / _ARC_CHORD_RADIANS))
        for i in range(1, chords):
            a = begin + extent * i / chords
            p, q = rx * math.cos(a), ry * math.sin(a)
            self._line((cx + cos * p - sin * q, cy + sin * p + cos * q))
            self.previous = "A"
        self._line(end)


def _cubic(
    p0: Coordinate, p1: Coordinate, p2: Coordinate, p3: Coordinate
) -> Callable[[float], Coordinate]:
    def position(t: float) -> Coordinate:
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        return (
            a * p0[0] + b * p1[0] + c * p2[0] + d * p3[0],
            a * p0[1] + b * p1[1] + c * p2[1] + d * p3[1],
        )

    return position


def _quadratic(p0: Coordinate, p1: Coordinate, p2: Coordinate) -> Callable[[float], Coordinate]:
    def position(t: float) -> Coordinate:
        a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t * t
        return a * p0[0] + b * p1[0] + c * p2[0], a * p0[1] + b * p1[1] + c * p2[1]

    return position
