"""Line charts as SVG, for a page that needs no scripts and no network.

The chart is drawn here because it is small. A library of plots would be a dependency of every client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Colours that people with any colour vision can tell apart (Okabe and Ito)."""
STYLE = """
figure { margin: 0 } figcaption { font-weight: 600 }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: var(--ink) }
.grid { stroke: var(--line); stroke-width: .5 } .axis { stroke: var(--ink); fill: none }
path.limit { stroke: #c00; stroke-dasharray: 2 3 } i.limit { border-top: 2px dotted #c00 }
.legend { font-size: 12px } .legend span { margin-right: 1rem; white-space: nowrap }
.legend i { display: inline-block; width: 1.6em; margin-right: .4em; vertical-align: middle }
"""
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 44
_TICKS = 8
"""The most intervals between the ticks of a linear axis."""
_X_LOG_FROM, _Y_LOG_FROM = 15.0, 30.0
"""An axis whose largest value is this many times its smallest is logarithmic."""


@dataclass(frozen=True)
class Series:
    """A line. ``points``: x, y and a text that is shown for the point; hollow points are those of ``hollow``."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    hollow: frozenset[float] = frozenset()
    """The x of points that are drawn hollow."""


class _Scale:
    """Maps values to places on an axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log_from: float) -> None:
        positive = [v for v in values if v > 0]
        least, most = min(positive, default=1.0), max(positive, default=1.0)
        self.is_log = most / least > log_from
        self._begin, self._end = begin, end
        if self.is_log:
            self._low, self._high = math.log10(least), math.log10(most)
        else:
            self._low, self._high = 0.0, most * 1.05

    def place(self, value: float) -> float:
        value = math.log10(max(value, 10**self._low)) if self.is_log else value
        span = self._high - self._low or 1.0
        return self._begin + (value - self._low) / span * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self.is_log:
            steps = (1, 2, 5) if self._high - self._low < 2.5 else (1,)
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            found = [step * 10.0**power for power in powers for step in steps]
            return [v for v in found if self._low - 1e-9 <= math.log10(v) <= self._high + 1e-9]
        rough = self._high / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
        return [step * i for i in range(int(self._high / step) + 1)]


def line_chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], limit: float | None = None
) -> str:
    """A figure of HTML, or nothing if no series has a point. ``limit``: a horizontal line."""
    series = [each for each in series if each.points]
    if not series:
        return ""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    x_scale = _Scale(xs, _LEFT, _WIDTH - _RIGHT, _X_LOG_FROM)
    y_scale = _Scale(
        [*ys, *([limit] if limit is not None else [])], _HEIGHT - _BOTTOM, _TOP, _Y_LOG_FROM
    )
    parts = _axes(x_scale, y_scale, x_title, y_title)
    if limit is not None:
        y = y_scale.place(limit)
        parts.append(f'<path class="limit" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    for each in series:
        parts += _line(each, x_scale, y_scale)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + f"</svg>{_legend(series, limit)}</figure>"
    )


def _axes(x_scale: _Scale, y_scale: _Scale, x_title: str, y_title: str) -> list[str]:
    bottom, middle = _HEIGHT - _BOTTOM, (_TOP + _HEIGHT - _BOTTOM) / 2
    parts = [
        f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>',
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, escape(x_title)),
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]
    for value in y_scale.ticks():
        y = y_scale.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    parts += [_text(x_scale.place(v), bottom + 18, f"{v:g}") for v in x_scale.ticks()]
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _line(series: Series, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    places = [(x_scale.place(x), y_scale.place(y)) for x, y in series.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = [f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="2"{dash}/>']
    for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
        fill = "var(--ground)" if value_x in series.hollow else series.colour
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{series.colour}">'
            f"<title>{escape(series.name)}, {value_x:g}: {value_y:.4g}</title></circle>"
        )
    return parts


def _legend(series: Sequence[Series], limit: float | None) -> str:
    entries = [
        f'<span><i style="border-top:2px {"dashed" if each.dashed else "solid"} {each.colour}"></i>'
        f"{escape(each.name)}</span>"
        for each in series
    ]
    if limit is not None:
        entries.append('<span><i class="limit"></i>limit</span>')
    return f'<div class="legend">{"".join(entries)}</div>'
