"""The page of a report: tables, and the worst images with what is expected and found drawn on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..page import PAGE_END, html_table, page_head, shown
from .pictures import figure_image
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
        f"<figure>{figure_image(each)}<figcaption>{escape(shown(scored.question))}<br>"
        f"<b class=truth>{escape(shown(scored.expected))}</b> &rarr; {said}<br>"
        f"<span class=small>{group}score {scored.value:.2f}, {escape(shown(scored.image))}, row {scored.row}</span>"
        "</figcaption></figure>\n"
    )
