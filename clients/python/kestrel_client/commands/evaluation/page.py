"""The page of a report: tables, and the worst images with what is expected and found drawn on them."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from kestrel_client.images.images import to_pillow

from ..page import PAGE_END, html_table, page_head, shown
from .benchmark import Case, Outcome
from .records import Edges
from .scored import Answered

_STYLE = """
:root { --truth: #009e73; --found: #d55e00 }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)) }
figure { background: #8881; border: 1px solid var(--line); border-radius: .5rem; margin: 0; overflow: hidden }
figure svg { display: block; width: 100%; height: 16rem; background: #0002 }
figcaption { padding: .6rem .8rem; overflow-wrap: anywhere } .small { font-size: .85em; opacity: .75 }
.truth { color: var(--truth) } .found { color: var(--found) } svg * { vector-effect: non-scaling-stroke }
svg .truth { fill: none; stroke: var(--truth); stroke-width: 3; stroke-dasharray: 7 4 }
svg .found { fill: none; stroke: var(--found); stroke-width: 2.5 }
svg .point { fill: var(--found); stroke: #fff; stroke-width: 1.5 }
"""
_SIDE = 480
"""Longest side of a reduced image, in pixels."""
_MOST = 100
"""Marks of a kind on an image."""
_PATH = re.compile(r"[MLCHVQAZSTmlchvqazst0-9eE .,+-]*")


def write_page(
    file: Path,
    title: str,
    notes: Iterable[str],
    rows: Sequence[Sequence[str]],
    worst: Sequence[Answered],
) -> None:
    """Raises OSError."""
    with file.open("w", encoding="utf-8") as opened:
        opened.write(page_head(title, notes, _STYLE) + html_table(rows))
        if worst:
            opened.write(
                f"<h2>The {len(worst)} worst answers</h2>\n<p class=small><span class=truth>- - expected</span>, "
                '<span class=found>&mdash; found</span></p>\n<div class="cards">\n'
            )
            for each in worst:  # One at a time: each has an image.
                opened.write(_card(each))
            opened.write("</div>\n")
        opened.write(PAGE_END)


def _card(each: Answered) -> str:
    scored = each.scored
    said = f"<b class=found>{escape(shown(scored.said)) or '(nothing)'}</b>"
    if scored.error is not None:
        said = f"<b class=found>failed: {escape(shown(scored.error))}</b>"
    group = f"{escape(scored.group)}, " if scored.group else ""
    return (
        f"<figure>{_figure_image(each)}<figcaption>{escape(shown(scored.question))}<br>"
        f"<b class=truth>{escape(shown(scored.expected))}</b> &rarr; {said}<br>"
        f"<span class=small>{group}score {scored.value:.2f}, {escape(shown(scored.image))}, row {scored.row}</span>"
        "</figcaption></figure>\n"
    )


def _figure_image(each: Answered) -> str:
    """An svg element, or a note if the image cannot be read."""
    buffer = io.BytesIO()
    try:
        image = to_pillow(each.item.load())
        size = image.size
        image.thumbnail((_SIDE, _SIDE))
        image.save(buffer, "JPEG", quality=80)
    except Exception as error:  # Decoders raise errors of many kinds for hostile files.
        return f"<p class=small>no image: {escape(str(error)[:200])}</p>"
    data = base64.b64encode(buffer.getvalue()).decode()
    marks = [*_expected(each.case, size), *_found(each.outcome, size)]
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}"><image width="{size[0]}" height="{size[1]}" '
        f'href="data:image/jpeg;base64,{data}"/>{"".join(marks)}</svg>'
    )


def _expected(case: Case, size: tuple[int, int]) -> Iterator[str]:
    width, height = case.frame or size
    across, down = size[0] / width, size[1] / height
    for box in case.boxes[:_MOST]:
        yield _rectangle((box[0] * across, box[1] * down, box[2] * across, box[3] * down), "truth")
    for polygon in case.polygons[:_MOST]:
        corners = " ".join(f"{x * across:.1f},{y * down:.1f}" for x, y in polygon)
        yield f'<polygon class="truth" points="{corners}"/>'


def _found(outcome: Outcome | None, size: tuple[int, int]) -> Iterator[str]:
    if outcome is None:
        return
    width, height = size
    for box in outcome.get("objects", ())[:_MOST]:
        yield _rectangle(_pixels(box, size), "found")
    points = list(outcome.get("points", ()))
    for answer in outcome.get("answers", ()):
        for chunk in (answer["reasoning"] or {}).get("grounding", ()):
            points += chunk["points"]
    radius = max(width, height) / 80
    for point in points[:_MOST]:
        x, y = point["x"] * width, point["y"] * height
        yield f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    for segment in outcome.get("segments", ()):
        path = segment["svg_path"]
        if not _PATH.fullmatch(path):
            continue
        left, top, right, bottom = _pixels(segment["box"], size)
        place = f"translate({left:.2f} {top:.2f}) scale({right - left:.4f} {bottom - top:.4f})"
        yield f'<path class="found" transform="{place}" d="{path}"/>'


def _pixels(box: dict[str, float], size: tuple[int, int]) -> Edges:
    width, height = size
    return (
        box["x_min"] * width,
        box["y_min"] * height,
        box["x_max"] * width,
        box["y_max"] * height,
    )


def _rectangle(edges: Edges, kind: str) -> str:
    left, top, right, bottom = edges
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0):.1f}" '
        f'height="{max(bottom - top, 0):.1f}"/>'
    )
