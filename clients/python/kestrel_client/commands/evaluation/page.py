"""The page of a report: HTML in one file, with tables, and images with what is expected and found drawn on them.

All texts of data sets and models are escaped, and the page allows no script and no address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from .pictures import figure_image
from .scored import Answered

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --truth: #009e73; --found: #d55e00; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
figure { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; margin: 0; overflow: hidden; }
figure svg { display: block; width: 100%; height: 16rem; background: #0002; }
figcaption { padding: .6rem .8rem; overflow-wrap: anywhere; }
figcaption b { font-weight: 600; } .small { font-size: .85em; opacity: .75; }
.truth { color: var(--truth); } .found { color: var(--found); }
svg * { vector-effect: non-scaling-stroke; }
svg .truth { fill: none; stroke: var(--truth); stroke-width: 3; stroke-dasharray: 7 4; }
svg .found { fill: none; stroke: var(--found); stroke-width: 2.5; }
svg .point { fill: var(--found); stroke: #fff; stroke-width: 1.5; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_LONGEST = 600
"""Characters of a text that are shown."""


def write_page(
    file: Path,
    title: str,
    notes: Iterable[str],
    rows: Sequence[Sequence[str]],
    worst: Sequence[Answered],
) -> None:
    """Raises OSError."""
    with file.open("w", encoding="utf-8") as opened:
        opened.write(page_head(title, notes) + html_table(rows))
        if worst:
            opened.write(
                f"<h2>The {len(worst)} worst answers</h2>\n<p class=small><span class=truth>- - expected</span>, "
                '<span class=found>&mdash; found</span></p>\n<div class="cards">\n'
            )
            for each in worst:  # One at a time: each has an image.
                opened.write(_card(each))
            opened.write("</div>\n")
        opened.write("</html>\n")


def page_head(title: str, notes: Iterable[str]) -> str:
    lines = "".join(f"<p>{escape(note)}</p>\n" for note in notes)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{lines}"
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>\n" for row in body
    )
    return f'<div class="scroll"><table>\n<tr>{cells}</tr>\n{lines}</table></div>\n'


def shown(text: str) -> str:
    """The beginning of a text."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


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
