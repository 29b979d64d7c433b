"""Draws how reliable scores are: the share of correct results against the score, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .score_fit import Bin

_SIDE, _GAP, _MARGIN = 220, 56, 48
_RAW, _CALIBRATED = "#888888", "#0072b2"


def draw(panels: Mapping[str, tuple[Sequence[Bin], Sequence[Bin]]]) -> str:
    """Returns an SVG document with a panel for each name, of its raw and its calibrated bins. The area of a dot grows
    with the number of its results."""
    width = _MARGIN + len(panels) * (_SIDE + _GAP)
    height = _SIDE + 2 * _MARGIN + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (name, (raw, calibrated)) in enumerate(panels.items()):
        parts += _panel(_MARGIN + index * (_SIDE + _GAP), name, raw, calibrated)
    legend = _MARGIN, height - 12
    parts.append(
        f'<text x="{legend[0]}" y="{legend[1]}"><tspan fill="{_RAW}">○ raw</tspan>'
        f'<tspan dx="16" fill="{_CALIBRATED}">● calibrated, on images that were not fitted</tspan></text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, name: str, raw: Sequence[Bin], calibrated: Sequence[Bin]) -> list[str]:
    top = _MARGIN
    title = f"{name}, {sum(each.count for each in raw)} results"
    parts = [
        f'<text x="{left}" y="{top - 12}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#444"/>',
        f'<line x1="{left}" y1="{top + _SIDE}" x2="{left + _SIDE}" y2="{top}" stroke="#bbb"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        x, y = left + share * _SIDE, top + (1 - share) * _SIDE
        parts.append(
            f'<text x="{x:g}" y="{top + _SIDE + 16}" text-anchor="middle">{share:g}</text>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{share:g}</text>')
    parts.append(
        f'<text x="{left + _SIDE / 2:g}" y="{top + _SIDE + 30}" text-anchor="middle">score</text>'
    )
    parts += _dots(left, top, raw, f'fill="none" stroke="{_RAW}"')
    parts += _dots(left, top, calibrated, f'fill="{_CALIBRATED}" fill-opacity="0.7"')
    return parts


def _dots(left: int, top: int, bins: Sequence[Bin], style: str) -> list[str]:
    most = max((each.count for each in bins), default=1)
    return [
        f'<circle cx="{left + each.mean_score * _SIDE:.1f}" cy="{top + (1 - each.correct) * _SIDE:.1f}" '
        f'r="{max(2.5, 9 * math.sqrt(each.count / most)):.1f}" {style}/>'
        for each in bins
    ]
