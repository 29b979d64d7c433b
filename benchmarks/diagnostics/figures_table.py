"""Formats the figures of a run as Markdown, for docs/lab/performance.md.

python -m benchmarks.diagnostics.figures_table out/bench/bench.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEADS = {
    "trace": "The trace through the engine",
    "decode": "Decode against its memory floor",
    "boxes": "Boxes a second",
    "vision": "Vision tower",
    "prefill": "Prefill",
    "saturate": "Saturated decode, engine alone",
    "trace_grpc": "Through the service",
    "startup": "Start",
    "quality": "Quality",
    "floors": "Ceilings of the machine",
}
"""The benchmarks in the order of the page. Other benchmarks follow."""


def tables(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields lines of Markdown: the machine and the commands, then a table for each benchmark."""
    machine: dict[str, Any] = {}
    for report in reports:
        machine |= report.get("machine", {})
    keys = ("gpu", "cores", "python", "torch", "triton", "cuda", "date")
    yield ", ".join(f"{name} {machine[name]}" for name in keys if name in machine) + "."
    names = dict.fromkeys([*HEADS, *(str(report["benchmark"]) for report in reports)])
    for name in names:
        some = [report for report in reports if report["benchmark"] == name]
        rows = [row for report in some for row in _rows(report)]
        if not rows:
            continue
        commands = dict.fromkeys(report.get("command", "") for report in some)
        yield f"\n### {HEADS.get(name, name)}\n"
        yield from (f"    {command}\n" for command in commands if command)
        yield "| figure | found | ceiling or floor | share | bar | goal | |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
        yield from rows


def _rows(report: dict[str, Any]) -> Iterator[str]:
    for figure in report.get("figures", []):
        share = figure.get("share")
        cells = [
            figure["name"],
            f"{_number(figure['value'])} {figure['unit']}",
            _number(figure.get("floor")),
            "" if share is None else f"{share:.0%}",
            _number(figure.get("bar")),
            _number(figure.get("goal")),
            figure.get("verdict", ""),
        ]
        yield f"| {' | '.join(cells)} |"
    for bar in report.get("bars", []):
        verdict = "met" if bar["is_met"] else "MISSED"
        cells = [bar["what"], _number(bar["value"]), "", "", _number(bar["limit"]), "", verdict]
        yield f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    """Formats a number with three significant digits, or an integer with all digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.diagnostics.figures_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", help="JSON that benchmarks wrote")
    args = parser.parse_args(arguments)
    reports: list[dict[str, Any]] = []
    for file in args.files:
        content = json.loads(file.read_text())
        reports += content if isinstance(content, list) else [content]
    for line in tables(reports):
        print(line)


if __name__ == "__main__":
    main()
