"""GpuReport: figures with the machine's limits, their bars, the machine and the command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .bars import NONE, Limits
from .report import Report, shown


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
class GpuReport(Report):
    """A Report whose figures are compared by ``compare.py``. ``command``: what was run."""

    figures: list[Figure] = field(default_factory=list)
    command: str = ""

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
        if self.figures:
            print("\nFigures")
            for figure in self.figures:
                print(f"  {line(figure)}")
        super().finish(path)

    def content(self, machine: dict[str, Any]) -> dict[str, Any]:
        figures = [asdict(f) | {"share": f.share, "verdict": f.verdict} for f in self.figures]
        return super().content(machine | describe_device()) | {
            "command": self.command,
            "figures": figures,
        }


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


def command_line(module: str, arguments: Sequence[str] | None) -> str:
    """Formats the command line of ``python -m module``."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", module, *given])


def describe_device() -> dict[str, Any]:
    """Returns the GPU and versions, if torch is imported and sees a GPU."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[str, Any] = {"torch": torch.__version__}
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
