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
    pause: float = 0.0
    """After a step that took on new work so many steps only decode, if all of its allowance was used and nobody else
    waits; in proportion less otherwise. What comes meanwhile is taken on together, which a GPU does faster."""


class Allowance:
    """What is left of one step's budget. The first piece of work is always let in, however large."""

    def __init__(self, budget: StepBudget, *, decoding: bool) -> None:
        self._scale = 1 if decoding else budget.idle_scale
        self._positions = budget.prefill_positions * self._scale
        self._crops = budget.crops * self._scale
        self._used = 0.0

    @property
    def is_spent(self) -> bool:
        return self._used >= 1

    @property
    def used(self) -> float:
        """The share that was taken, at most 1."""
        return min(self._used, 1.0)

    @property
    def work(self) -> float:
        """What was taken, as a multiple of all new work that one step may hold beside decoding."""
        return self._used * self._scale

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


class Pacer:
    """Counts the steps that pause. One burst of requests would else be taken on in steps without a break, its answers
    would end together as well, and the next burst come of that; and single requests would each have a step of their
    own."""

    def __init__(self, budget: StepBudget) -> None:
        self._pause = budget.pause
        self._left = 0.0

    def pauses(self, num_decode: int) -> bool:
        """Whether a step of ``num_decode`` rows only decodes. Counts it."""
        if not num_decode or self._left < 1:
            return False
        self._left -= 1
        return True

    def took(self, share: float, num_decode: int, num_waiting: int) -> None:
        """A step took on ``share`` of its allowance, and so many still wait."""
        self._left = self._pause * share * num_decode / max(1, num_decode + num_waiting)
