"""PlaceTaker: which running sequence gives its batch place to a waiting one. Owns how often that happens.

When the batch is full, a place passes from a principal with more than its share of the batch to one with less. A
sequence of the best priority may also take a place from its own principal's sequences of lesser priority, unless these
were preempted a few times before: otherwise the best priority would starve them. The sequence that loses its place
waits again, ahead of the others of its principal. Its computed positions stay in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..sequence import Sequence
from ..shares import Shares

_SPREAD_STEPS = 8
"""In this number of steps, at most one batch of sequences loses its places. Runtimes keep the state of a sequence for a
few steps after its last row, for at most two batches."""

_MOST_PREEMPTED = 3
"""A sequence that was preempted so many times gives its place to no sequence of its own principal."""


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
        """The running sequence that gives its place to ``taker``; None if no place may pass.

        The least priority goes first, then sequences that decode, then the youngest."""
        givers = [s for s in running if self._may_take(taker, s)]
        if not givers:
            return None
        return max(
            givers,
            key=lambda s: (s.priority, not s.needs_prefill, s.submission.arrived_at, s.sequence_id),
        )

    def took(self) -> None:
        self._pause = self._interval

    def _may_take(self, taker: Sequence, giver: Sequence) -> bool:
        assert taker.account is not None and giver.account is not None
        if giver.steps_out:
            return False
        if taker.account is giver.account:
            return taker.priority == 0 and 0 < giver.priority and giver.epoch < _MOST_PREEMPTED
        return self._shares.may_take_from(taker.account, giver.account)
