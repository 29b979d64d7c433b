"""PlaceTaker: whose batch place goes to a sequence that waits, while the batch is full. Owns how often that happens.

A place passes from a principal with more than its share of the batch to one with less. One of the best priority may
also take a place of its own principal's lesser work. The sequence that loses its place waits again, ahead of the others
of its principal; what it computed stays in the prefix cache, so going on costs it little.
"""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import Sequence
from .shares import Shares

_SPREAD_STEPS = 8
"""Over so many steps at most one batch of sequences loses its places: runtimes keep what belongs to a sequence for a
few steps after its last row, for at most two batches."""


class PlaceTaker:
    """One a scheduler; ``next_step`` once a step, ``took`` when a place has passed."""

    def __init__(self, max_batch_size: int, shares: Shares) -> None:
        self._shares = shares
        self._interval = -(-_SPREAD_STEPS // max_batch_size)
        self._pause = 0

    def next_step(self) -> bool:
        """Whether a place may be taken in this step. Counts it."""
        self._pause = max(0, self._pause - 1)
        return self._pause == 0

    def victim(self, taker: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """The running sequence that gives its place to ``taker``: of the least priority, one that decodes rather than
        one whose prompt is being computed, the youngest; None if no place may pass."""
        givers = [s for s in running if self._may_take(taker, s)]
        if not givers:
            return None
        return max(
            givers,
            key=lambda s: (s.priority, not s.needs_prefill, s.submission.arrived_at, s.sequence_id),
        )

    def took(self) -> None:
        """A place was taken in this step."""
        self._pause = self._interval

    def _may_take(self, taker: Sequence, giver: Sequence) -> bool:
        assert taker.account is not None and giver.account is not None
        if taker.account is giver.account:
            return taker.priority == 0 and giver.priority > 0
        return self._shares.may_take_from(taker.account, giver.account)
