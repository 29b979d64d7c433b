"""A page of HTML in one file, for reports. It loads nothing and allows no script. All texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #222; --line: #8884 }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #ddd } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
  background: var(--ground); color: var(--ink) }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2.5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; vertical-align: top;
  white-space: nowrap }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_LONGEST = 600
"""Characters of a text that are shown."""


def page_head(title: str, notes: Iterable[str], style: str = "") -> str:
    lines = "".join(f"<p>{escape(note)}</p>\n" for note in notes)
    return (
        '<!doctype html>\n<html lang="en"><head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{lines}"
    )


PAGE_END = "</body></html>\n"


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
