"""Report: the results of a benchmark, as tables and as JSON: figures with the machine's limits, and their bars."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kestrel_client.commands.bench import results

from .bars import NONE, Limits

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


@dataclass(frozen=True)
class Figure:
    """One number that may be compared with another run's by ``name``; ``floor``, ``bar`` and ``goal`` have its unit.

    ``at_least``: more is better. ``floor``: what the machine would allow, measured in the same run.
    """

    name: str
    value: float
    unit: str
    at_least: bool
    floor: float | None = None
    bar: float | None = None
    goal: float | None = None

    @property
    def share(self) -> float | None:
        """How much of what the machine allows was reached, 0 to 1."""
        if self.floor is None or not self.value or not self.floor:
            return None
        return self.value / self.floor if self.at_least else self.floor / self.value

    def reaches(self, limit: float) -> bool:
        return self.value >= limit if self.at_least else self.value <= limit

    @property
    def verdict(self) -> str:
        if self.goal is not None and self.reaches(self.goal):
            return "goal met"
        if self.bar is None:
            return ""
        return "met" if self.reaches(self.bar) else "MISSED"


@dataclass
class Report:
    """Tables by title, figures that ``compare.py`` compares, and bars. ``settings``: of the run. ``command``: what was
    run."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    command: str = ""

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

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        limits: Limits = NONE,
        *,
        at_least: bool = True,
        floor: float | None = None,
    ) -> None:
        """Records a figure and prints it. ``name`` must be new."""
        assert all(f.name != name for f in self.figures), f"two figures named {name!r}"
        self.figures.append(Figure(name, value, unit, at_least, floor, *limits))
        print(f"  {line(self.figures[-1])}", flush=True)

    def finish(self, path: str | None) -> None:
        """Prints figures, bars and the machine, and writes the whole report to ``path``, if given."""
        machine = describe_machine()
        if self.figures:
            print("\nFigures")
        for figure in self.figures:
            print(f"  {line(figure)}")
        if self.bars:
            print()
        for bar in self.bars:
            relation = "at least" if bar.at_least else "at most"
            verdict = "met   " if bar.is_met else "MISSED"
            print(f"{verdict} {bar.what}: {shown(bar.value)}, {relation} {shown(bar.limit)}")
        print(f"\n{', '.join(f'{name} {value}' for name, value in machine.items())}")
        if path is not None:
            content = {
                "benchmark": self.name,
                "machine": machine,
                "settings": self.settings,
                "tables": self.tables,
                "bars": [asdict(bar) | {"is_met": bar.is_met} for bar in self.bars],
                "command": self.command,
                "figures": [
                    asdict(f) | {"share": f.share, "verdict": f.verdict} for f in self.figures
                ],
            }
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")


def line(figure: Figure) -> str:
    """Formats a figure as one line of text."""
    parts = [f"{figure.name}: {shown(float(figure.value))} {figure.unit}"]
    share = figure.share
    if share is not None and figure.floor is not None:
        parts.append(f"{100 * share:.1f} % of {shown(figure.floor)}")
    if figure.bar is not None:
        parts.append(f"bar {shown(figure.bar)}")
    if figure.goal is not None:
        parts.append(f"goal {shown(figure.goal)}")
    if figure.verdict:
        parts.append(figure.verdict)
    return ", ".join(parts)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of ``values`` do not exceed (nearest rank); nan without
    any."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def describe_machine() -> dict[str, Any]:
    """Returns the machine, the date and the load, which shows whether other processes were active; and the GPU and
    versions, if torch is imported."""
    found = results.describe_machine()
    del found["libraries"]
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    found["torch"] = torch.__version__
    triton = sys.modules.get("triton")
    if triton is not None:
        found["triton"] = triton.__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpus"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found


def shown(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
