"""Compares the figures of two runs: those that both have, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .results import Plain, figures

Figures: TypeAlias = Mapping[str, tuple[float, bool]]
"""The value of each figure and whether more is better, by name."""


class FigureComparison(NamedTuple):
    """``worse``: the share by which the new figure is worse; negative if it is better."""

    name: str
    old: float
    new: float
    worse: float


def compare(old: Figures, new: Figures) -> list[FigureComparison]:
    """Returns the figures that both runs have, the worst first."""
    found = []
    for name in old.keys() & new.keys():
        (before, at_least), (after, _) = old[name], new[name]
        # As time for the same work: half the rate and twice the time are both 100 % worse.
        more, less = (before, after) if at_least else (after, before)
        worse = more / less - 1 if less else (math.inf if more else 0.0)
        found.append(FigureComparison(name, before, after, worse))
    return sorted(found, key=lambda c: (-c.worse, c.name))


def compare_files(runs: Sequence[Plain], tolerance: float) -> int:
    """Prints the comparison of each run with the first. Returns how many figures are worse by more than ``tolerance``
    percent."""
    first, *others = runs
    old = _figures(first)
    total = 0
    for run in others:
        print(f"{run['label']} compared with {first['label']}")
        for what in ("server", "machine"):
            old_facts, facts = first[what], run[what]
            changed = (
                f"{name} {old_facts.get(name)} -> {facts.get(name)}"
                for name in _COMPARED
                if old_facts.get(name) != facts.get(name)
            )
            if difference := ", ".join(changed):
                print(f"  the {what} differs: {difference}")
        found = compare(old, _figures(run))
        if not found:
            print("  nothing to compare: no stage of both has the same load")
        worse = [each for each in found if 100 * each.worse > tolerance]
        total += len(worse)
        for each in found:
            mark = "WORSE" if 100 * each.worse > tolerance else ""
            print(
                f"{mark:6}{100 * each.worse:+8.1f} %  {each.name}: {each.old:.4g} -> {each.new:.4g}"
            )
        print(f"  {len(found)} compared, {len(worse)} worse by more than {tolerance:g} %")
    return total


def _figures(run: Plain) -> Figures:
    return {f["name"]: (float(f["value"]), bool(f["at_least"])) for f in figures(run["results"])}


_COMPARED = (
    "server_version", "device", "device_name", "dtype", "default_model", "weights_fingerprint", "cores", "memory_gib",
    "python", "system"
)  # fmt: skip
