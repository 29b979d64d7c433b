"""The table in docs/run/operations.md of all flags of ``serve``, made from the parser. ``make docs`` writes it anew."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kestrel_grpc.cli import serve
from kestrel_grpc.settings.flags import Parser

PAGE = Path(__file__).parents[2] / "docs/run/operations.md"
BEGIN = "<!-- flags: written by `make docs` -->\n"
END = "<!-- end of flags -->\n"
_DEFAULT = re.compile(r"^(?P<what>.*) \[(?P<default>.*); (?P<variable>KESTREL_[A-Z0-9_]+)\]$")


def table() -> str:
    """A section for each group of flags."""
    parser = Parser(prog="kestrel-grpc serve")
    serve.add_arguments(parser, "serve")
    keys = {s.dest: f"{s.section}.{s.key}" for s in parser.sources.settings if s.section}
    parts = []
    for group in parser._action_groups:
        rows = [
            _row(action, keys.get(action.dest, ""))
            for action in group._group_actions
            if action.option_strings and action.dest != "help"
        ]
        if rows:
            title = "the command itself" if group.title == "options" else group.title
            parts.append(
                f"**{title}**\n\n| flag | in a file | default | what |\n| --- | --- | --- | --- |\n"
                + "".join(rows)
            )
    return "\n".join(parts)


def _row(action: argparse.Action, key: str) -> str:
    match = _DEFAULT.match(action.help or "")
    what, default = (match["what"], match["default"]) if match else (action.help or "", "")
    takes = action.metavar or "|".join(map(str, action.choices or ()))
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if takes and action.nargs != 0:
        flags += f" {takes}"
    cells = (flags, f"`{key}`" if key else "", default, what)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def page_with(flags: str) -> str:
    """The page with ``flags`` between its marks."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert rest and tail is not None, f"{PAGE.name} lacks its marks"
    return f"{head}{BEGIN}\n{flags}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
