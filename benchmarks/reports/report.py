"""Report: the results of a benchmark, as tables and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, float | int | str]


@dataclass(frozen=True)
class Bar:
    """The limit of a figure: ``value`` must be at most ``limit``, or at least ``limit`` with ``at_least``."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Report:
    """Tables by title, and bars. ``settings``: the settings of the run."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def add(self, title: str, row: Row) -> None:
        """Adds a row to a table and prints it at once, because runs are long. A nan becomes "-"."""
        row = {
            name: "-" if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()
        }
        if title not in self.tables:
            self.tables[title] = []
            print(f"\n{title}\n{'  '.join(f'{name:>12}' for name in row)}")
        self.tables[title].append(row)
        print("  ".join(f"{shown(value):>12}" for value in row.values()), flush=True)

    def bar(self, what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        self.bars.append(Bar(what, value, limit, at_least))

    def finish(self, path: str | None) -> None:
        """Prints the bars and the machine, and writes the whole report to ``path``, if given."""
        machine = describe_machine()
        if self.bars:
            print()
        for bar in self.bars:
            relation = "at least" if bar.at_least else "at most"
            verdict = "met   " if bar.is_met else "MISSED"
            print(f"{verdict} {bar.what}: {shown(bar.value)}, {relation} {shown(bar.limit)}")
        print(f"\n{', '.join(f'{name} {value}' for name, value in machine.items())}")
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(self.content(machine), indent=1, default=str) + "\n")

    def content(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Returns the contents of the JSON file."""
        return {
            "benchmark": self.name,
            "machine": machine,
            "settings": self.settings,
            "tables": self.tables,
            "bars": [asdict(bar) | {"is_met": bar.is_met} for bar in self.bars],
        }


def benchmark_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of ``benchmarks.<module>``, with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", help="write tables, bars and machine to FILE")
    parser.add_argument(
        "--quick", action="store_true", help="do a hundredth of the work, as a smoke test"
    )
    return parser


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of ``values`` do not exceed (nearest rank); nan without
    any."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def describe_machine() -> dict[str, Any]:
    """Returns the machine, the date and the load, which shows whether other processes were active."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": sys.platform,
    }


def shown(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
