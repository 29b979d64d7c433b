"""Compares the figures of two runs: those that both have, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

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


def print_comparison(found: Sequence[FigureComparison], tolerance: float) -> int:
    """Prints the figures. Returns how many are worse by more than ``tolerance`` percent."""
    worse = 0
    for one in found:
        is_worse = 100 * one.worse > tolerance
        worse += is_worse
        change = f"{'WORSE' if is_worse else '':5}  {100 * one.worse:+7.1f} %"
        print(f"{change}  {one.name}: {one.old:.4g} -> {one.new:.4g}")
    print(f"{len(found)} compared, {worse} worse by more than {tolerance:g} %")
    return worse
