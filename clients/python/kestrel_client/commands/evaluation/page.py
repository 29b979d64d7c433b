"""The page of a report: tables, and the worst images with what is expected and found drawn on them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import islice
from pathlib import Path

from kestrel_client.images.image_forms import to_pillow
from kestrel_client.values.results.showing import draw_marks

from ..batch.overlays import marks_of
from ..page import PAGE_END, html_table, page_head, shown
from .benchmark import Case
from .scored import AnsweredCase

_STYLE = """
:root { --truth: #009e73; --found: #d55e00 }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)) }
figure { background: #8881; border: 1px solid var(--line); border-radius: .5rem; margin: 0; overflow: hidden }
figure svg { display: block; width: 100%; height: 16rem; background: #0002 }
figcaption { padding: .6rem .8rem; overflow-wrap: anywhere } .small { font-size: .85em; opacity: .75 }
.truth { color: var(--truth) } .found { color: var(--found) } svg * { vector-effect: non-scaling-stroke }
svg .truth { fill: none; stroke: var(--truth); stroke-width: 3; stroke-dasharray: 7 4 }
"""
_SIDE = 480
"""Longest side of a reduced image, in pixels."""
_MOST = 100
"""Expected objects on an image."""


def write_page(
    file: Path,
    title: str,
    notes: Iterable[str],
    rows: Sequence[Sequence[str]],
    worst: Sequence[AnsweredCase],
) -> None:
    """Raises OSError."""
    with file.open("w", encoding="utf-8") as opened:
        opened.write(page_head(title, notes, _STYLE) + html_table(rows))
        if worst:
            opened.write(
                f"<h2>The {len(worst)} worst answers</h2>\n<p class=small><span class=truth>- - expected</span>, "
                'and without dashes what was found</p>\n<div class="cards">\n'
            )
            for each in worst:  # One at a time: each has an image.
                opened.write(_card(each))
            opened.write("</div>\n")
        opened.write(PAGE_END)


def _card(each: AnsweredCase) -> str:
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


def _figure_image(each: AnsweredCase) -> str:
    """An svg element, or a note if the image cannot be read."""
    buffer = io.BytesIO()
    try:
        image = to_pillow(each.item.load())
        size = image.size
        if each.outcome is not None:
            image = draw_marks(replace(marks_of(each.outcome), text=()), image, None)
        image.thumbnail((_SIDE, _SIDE))
        image.save(buffer, "JPEG", quality=80)
    except Exception as error:  # Decoders raise errors of many kinds for hostile files.
        return f"<p class=small>no image: {escape(str(error)[:200])}</p>"
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}"><image width="{size[0]}" height="{size[1]}" '
        f'href="data:image/jpeg;base64,{data}"/>{"".join(_expected(each.case, size))}</svg>'
    )


def _expected(case: Case, size: tuple[int, int]) -> Iterator[str]:
    width, height = case.frame or size
    across, down = size[0] / width, size[1] / height
    boxes = (((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, y0, x1, y1 in case.boxes)
    for polygon in islice(boxes, _MOST):
        corners = " ".join(f"{x * across:.1f},{y * down:.1f}" for x, y in polygon)
        yield f'<polygon class="truth" points="{corners}"/>'
