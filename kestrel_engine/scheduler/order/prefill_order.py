"""PrefillOrder: the order in which a step computes prompts and images of the batch.

Images and text alternate at the head, so that neither delays the other by more than a step. Texts are ordered by the
time of their admission; a long text counts as admitted later. Principals take turns. Urgent requests go first: those of
the best priority, and those that waited in the batch long enough to count as such.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..policy import SchedulerPolicy
from ..sequence import Sequence
from ..shares import Shares


class PrefillOrder:
    """One a scheduler; ``order`` once a step."""

    def __init__(self, policy: SchedulerPolicy, shares: Shares) -> None:
        self._policy, self._shares = policy, shares
        self._images_first = True

    def order(self, running: Iterable[Sequence], now: float) -> list[Sequence]:
        """The sequences of ``running`` with prompt positions left to compute, in order."""
        waiting = [s for s in running if s.needs_prefill]
        images = [s for s in waiting if s.needed]
        text = [s for s in waiting if not s.needed]
        text.sort(key=self._text_rank)
        if images and text:
            self._images_first = not self._images_first
        ordered = images + text if self._images_first else text + images
        if len(self._shares.members) > 1:
            ordered = self._in_turns(ordered)
        ordered.sort(key=lambda s: not self._is_urgent(s, now))
        return ordered

    def _is_urgent(self, sequence: Sequence, now: float) -> bool:
        assert sequence.account is not None
        if self._shares.exceeds(sequence.account):
            return False
        waited = now - sequence.queued_since
        return sequence.priority == 0 or waited > sequence.priority * self._policy.aging_s

    def _text_rank(self, sequence: Sequence) -> float:
        """The instant of admission, delayed by priority as in the queue and by the number of tokens left. No text
        starves: texts that are admitted much later rank behind it, however short they are."""
        left = len(sequence.tokens) - sequence.cursor
        delay = sequence.priority * self._policy.aging_s + left * self._policy.yield_s_per_position
        return sequence.queued_since + delay

    @staticmethod
    def _in_turns(ordered: list[Sequence]) -> list[Sequence]:
        """The first sequence of each principal, then the second of each, and so on. The principal that used least goes
        first."""
        seen: dict[object, int] = {}
        ranks: dict[int, tuple[int, float]] = {}
        for sequence in ordered:
            account = sequence.account
            assert account is not None
            turn = seen[account] = seen.get(account, -1) + 1
            ranks[sequence.sequence_id] = (turn, account.used)
        return sorted(ordered, key=lambda s: ranks[s.sequence_id])
