"""Intake: the new work of a step, within its allowance: images and prompts of the batch, and masks.

Owns the masks that wait to be refined, and whether images are to be dropped at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...types.step import MOST_REFINED, RefineRow
from ..batch import Batch
from ..budget import Allowance
from ..draft import Draft
from ..order.slices import Slices
from ..order.turns import Turns
from ..policy import SchedulerPolicy
from ..sequence import Sequence
from ..shares import Shares


class PrefillOrder:
    """The order in which a step computes prompts and images of the batch. One a scheduler; ``order`` once a step.

    Images and text alternate at the head, so that neither delays the other by more than a step. Texts are ordered by
    the time of their admission; a long text counts as admitted later. Principals take turns. Urgent requests go first:
    those of the best priority, and those that waited in the batch long enough to count as such.
    """

    def __init__(self, policy: SchedulerPolicy, shares: Shares) -> None:
        self._policy, self._shares = policy, shares
        self._images_first = True

    def order(self, running: Iterable[Sequence], now: float) -> list[Sequence]:
        """The sequences of ``running`` with prompt positions left to compute, in order."""
        waiting = [s for s in running if s.needs_prefill]
        if not waiting:
            return waiting
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
        """The first sequence of each principal, then the second of each. The principal that used least goes first."""
        seen: dict[object, int] = {}
        ranks: dict[int, tuple[int, float]] = {}
        for sequence in ordered:
            account = sequence.account
            assert account is not None
            turn = seen[account] = seen.get(account, -1) + 1
            ranks[sequence.sequence_id] = (turn, account.used)
        return sorted(ordered, key=lambda s: ranks[s.sequence_id])


CROPS_OF_A_MASK = 4
"""A mask to refine takes at most as long as this many crops of an image: one pass of the tower, and the refiner's."""


class Intake:
    """``begin``, ``schedule`` and ``add_masks`` for each draft with new work, ``settle`` if it is not empty."""

    def __init__(self, batch: Batch, policy: SchedulerPolicy, shares: Shares) -> None:
        self._batch, self._shares = batch, shares
        self._budget = policy.budget
        self._order = PrefillOrder(policy, shares)
        self._slices = Slices(policy.budget, batch.images) if policy.budget.slices else None
        self.masks: deque[RefineRow] = deque()
        """Masks of sequences that have ended, in the order of their ends."""
        self.is_flushing = False
        """Whether the next step is due even if it only drops images."""

    def flush(self) -> None:
        self._batch.flush()
        images = self._batch.images
        self.is_flushing = images.has_dropped or images.crops.has_dropped

    def drop_mask(self, sequence_id: int) -> None:
        """Removes a mask that waits, if there is one."""
        self.masks = deque(row for row in self.masks if row.sequence_id != sequence_id)

    def begin(self, draft: Draft) -> None:
        """Images that are dropped from here on are used by the step."""
        draft.dropped = self._batch.images.take_dropped()
        draft.is_due = self.is_flushing

    def schedule(
        self, draft: Draft, turns: Turns, now: float, *, bounded: bool
    ) -> tuple[float, int]:
        """Schedules images and prompts. ``bounded``: only as much as beside decoding. Returns the used share of the
        allowance, and the number of sequences with more to compute."""
        order = self._order.order(turns.of(self._batch.running.values()), now)
        if not order:
            return 0.0, 0
        chosen, crops_only = order, False
        if bounded and self._slices is not None:
            chosen, crops_only = self._slices.choose(order)
        allowance = Allowance(self._budget, decoding=bounded)
        for sequence in chosen:
            if allowance.is_spent:
                break
            before = allowance.amount
            draft.add_new_work(sequence, allowance, crops_only=crops_only)
            assert sequence.account is not None
            self._shares.charge(sequence.account, allowance.amount - before)
        return allowance.used, sum(1 for sequence in order if sequence.needs_prefill)

    def add_masks(self, draft: Draft) -> None:
        """Decoding rows of the step wait for the masks."""
        allowed = self._budget.crops // CROPS_OF_A_MASK if draft.decode else MOST_REFINED
        most = min(MOST_REFINED, max(1, allowed))
        while self.masks and len(draft.refine) < most:
            draft.refine.append(self.masks.popleft())

    def settle(self, draft: Draft) -> None:
        """Completes a draft that is not empty."""
        draft.dropped_crops = self._batch.images.crops.take_dropped()
        self.is_flushing = False
