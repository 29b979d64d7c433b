"""StepBudget and Allowance: how much new work one step may hold.

Vision and prefill share one allowance: a step runs them one after the other, and sequences that decode wait for both.
"""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SCALE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """New work beside a running decode batch: this many prompt positions, or this many crops, or a share of each.

    It is the one setting that trades TTFT for ITL. While no sequence decodes, a step may hold ``idle_scale`` times as
    much.
    """

    prefill_positions: int = 768
    crops: int = 3
    idle_scale: int = IDLE_SCALE
    pause: float = 0.0
    """Number of steps that only decode after a step that used its whole allowance for new work. Fewer steps pause if
    the step used less, or if sequences wait. Work that arrives during the pause is computed together, which is faster
    on a GPU."""
    slices: bool = False
    """Beside decoding, a step computes either crops or prompts. Prompts wait until they fill a step, until no crops are
    left, or for MOST_HELD steps. So steps can be short, and yet compute several prompts together."""


MOST_HELD = 4
"""The most steps of crops for which a prompt waits, with ``slices``."""


class Allowance:
    """The rest of one step's budget. The first piece of work is always allowed, however large it is."""

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
        """The used share, at most 1."""
        return min(self._used, 1.0)

    @property
    def amount(self) -> float:
        """The used amount, as a multiple of all new work that one step may hold beside decoding."""
        return self._used * self._scale

    @property
    def crops(self) -> int:
        """Crops that the step may still encode."""
        left = int((1 - self._used) * self._crops + 1e-9)
        return max(left, 1 if self._used == 0 else 0)

    @property
    def positions(self) -> int:
        """Prompt positions that the step may still compute."""
        left = int((1 - self._used) * self._positions + 1e-9)
        return max(left, 1 if self._used == 0 else 0)

    def allows_whole(self, positions: int) -> bool:
        """Whether the step may compute a piece that can't be divided."""
        return self._used == 0 or positions <= self.positions

    def take_crops(self, count: int) -> None:
        self._used += count / self._crops

    def take_positions(self, count: int) -> None:
        self._used += count / self._positions


class Pacer:
    """Counts the steps that pause. Without pauses, one burst of requests would be prefilled in consecutive steps, would
    end at the same time and cause the next burst; and each single request would have a step of its own."""

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
        """Notes that a step used ``share`` of its allowance, with ``num_waiting`` sequences left to compute."""
        self._left = self._pause * share * num_decode / max(1, num_decode + num_waiting)
