"""Compares two runs, figure by figure, and fails if a figure is worse by more than the tolerance.

python -m benchmarks.compare OLD NEW [--tolerance 5]

OLD and NEW are JSON files that the benchmarks wrote, or folders of such files. Figures are matched by benchmark and
name. The exit status is 1 if a figure is worse by more than the tolerance, and 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_client.commands.bench.comparison import FigureComparison, print_comparison
from kestrel_client.commands.bench.comparison import compare as compare_figures


@dataclass(frozen=True)
class Run:
    """``figures``: by (benchmark, name), the value and whether more is better. ``machines``: the measured machines."""

    figures: dict[tuple[str, str], tuple[float, bool]]
    machines: set[str]


def read_run(path: Path) -> Run:
    """Reads a file with a report or a list of reports, or all files of a folder. Ignores other content."""
    figures: dict[tuple[str, str], tuple[float, bool]] = {}
    machines: set[str] = set()
    reports: list[Any] = []
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        content: Any = json.loads(file.read_text())
        reports += content if isinstance(content, list) else [content]
    for content in reports:
        if not isinstance(content, dict) or "benchmark" not in content:
            continue
        machine = content.get("machine", {})
        machines.add(str(machine.get("gpu", f"{machine.get('cores')} cores")))
        for figure in content.get("figures", []):
            key = content["benchmark"], figure["name"]
            figures[key] = float(figure["value"]), bool(figure["at_least"])
        for bar in content.get("bars", []):
            key = content["benchmark"], bar["what"]
            figures[key] = float(bar["value"]), bool(bar["at_least"])
    return Run(figures, machines)


def compare(old: Run, new: Run) -> list[FigureComparison]:
    """Returns the figures that both runs have, the worst first."""
    first, second = (
        {": ".join(key): value for key, value in run.figures.items()} for run in (old, new)
    )
    return compare_figures(first, second)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, help="JSON file or folder of the earlier run")
    parser.add_argument("new", type=Path, help="JSON file or folder of the later run")
    parser.add_argument(
        "--tolerance", type=float, default=5.0, help="percent by which a figure may be worse [5]"
    )
    args = parser.parse_args(arguments)
    old, new = read_run(args.old), read_run(args.new)
    if old.machines != new.machines:
        print(f"taken on different machines: {sorted(old.machines)} and {sorted(new.machines)}")
    found = compare(old, new)
    if not found:
        print("nothing to compare: no figure is in both")
        return 2
    for title, keys in (
        ("new", new.figures.keys() - old.figures.keys()),
        ("missing", old.figures.keys() - new.figures.keys()),
    ):
        for key in sorted(keys):
            print(f"{title}: {': '.join(key)}")
    return int(print_comparison(found, args.tolerance) > 0)


if __name__ == "__main__":
    sys.exit(main())
