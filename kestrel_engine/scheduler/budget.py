"""StepBudget and Allowance: how much new work one step may hold.

Vision and prefill share one allowance: a step runs them one after the other, and those who decode wait for the sum.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """New work beside a running decode batch: this many prompt positions, or this many crops, or a share of each.

    It is the one knob between TTFT and ITL. While nobody decodes a step may hold ``idle_scale`` times as much.
    """

    prefill_positions: int = 768
    crops: int = 3
    idle_scale: int = 8


class Allowance:
    """What is left of one step's budget. The first piece of work is always let in, however large."""

    def __init__(self, budget: StepBudget, *, decoding: bool) -> None:
        scale = 1 if decoding else budget.idle_scale
        self._positions = budget.prefill_positions * scale
        self._crops = budget.crops * scale
        self._used = 0.0

    @property
    def is_spent(self) -> bool:
        return self._used >= 1

    @property
    def crops(self) -> int:
        """Crops that may still be taken."""
        left = int((1 - self._used) * self._crops + 1e-9)
        return max(left, 1 if self._used == 0 else 0)

    @property
    def positions(self) -> int:
        """Prompt positions that may still be taken."""
        left = int((1 - self._used) * self._positions + 1e-9)
        return max(left, 1 if self._used == 0 else 0)

    def allows_whole(self, positions: int) -> bool:
        """Whether a piece that can't be divided may be taken."""
        return self._used == 0 or positions <= self.positions

    def take_crops(self, count: int) -> None:
        self._used += count / self._crops

    def take_positions(self, count: int) -> None:
        self._used += count / self._positions
