"""The tables of the pages that have a source in the code: every flag of ``serve``, and every metric.

``make docs`` writes them between the marks of their pages.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from kestrel_grpc.cli import serve
from kestrel_grpc.settings.flags import Parser
from kestrel_grpc.telemetry.names import METRICS

ROOT = Path(__file__).parents[2]
_DEFAULT = re.compile(r"^(?P<what>.*) \[(?P<default>.*); (?P<variable>KESTREL_[A-Z0-9_]+)\]$")


def flags() -> str:
    """A table for each group of flags, with its section of the configuration file."""
    parser = Parser(prog="kestrel-grpc serve")
    serve.add_arguments(parser, "serve")
    sections = {s.dest: s.section for s in parser.sources.settings if s.section}
    parts = []
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.option_strings and a.dest != "help"]
        if actions:
            title = "the command itself" if group.title == "options" else str(group.title)
            named = ", ".join(
                dict.fromkeys(f"`[{sections[a.dest]}]`" for a in actions if a.dest in sections)
            )
            parts.append(
                f"**{title}**{f', {named} in a file' if named else ''}\n\n"
                "| flag | default | what |\n| --- | --- | --- |\n" + "".join(map(_flag, actions))
            )
    return "\n".join(parts)


def _flag(action: argparse.Action) -> str:
    match = _DEFAULT.match(action.help or "")
    what, default = (match["what"], match["default"]) if match else (action.help or "", "")
    takes = action.metavar or "|".join(map(str, action.choices or ()))
    names = ", ".join(f"`{flag}`" for flag in action.option_strings)
    return _row(names + (f" {takes}" if takes and action.nargs != 0 else ""), default, what)


def metrics() -> str:
    """A row for each metric: its names in OpenTelemetry and in Prometheus."""
    head = (
        "| metric | for Prometheus | kind | attributes | what |\n| --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(
        _row(
            f"`{m.name}`",
            f"`{m.prometheus_name}`",
            m.kind,
            ", ".join(f"`{name}`" for name in m.attributes),
            m.description,
        )
        for m in METRICS.values()
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "flags": (ROOT / "docs/run/settings.md", flags),
    "metrics": (ROOT / "docs/run/metrics.md", metrics),
}


def parts(name: str) -> tuple[str, str]:
    """The text of a page before and after its table, with the marks."""
    page, _ = TABLES[name]
    head, begin, rest = page.read_text().partition(f"<!-- {name}: written by `make docs` -->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
    assert begin and end, f"{page.name} lacks its marks"
    return head + begin, end + tail


def page_with_table(name: str) -> str:
    head, tail = parts(name)
    return f"{head}\n{TABLES[name][1]()}\n{tail}"


if __name__ == "__main__":
    for name, (page, _) in TABLES.items():
        page.write_text(page_with_table(name))
