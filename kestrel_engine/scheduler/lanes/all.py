"""AllLane: the only lane of a runtime that does one step after the other. Owns the pace of new work beside decoding."""

from __future__ import annotations

from ...types.step import Lane
from ..batch import Batch
from ..budget import Pacer
from ..draft import Draft
from ..policy import SchedulerPolicy
from ..sequence import Sequence
from ..shares import Shares
from .intake import Intake
from .lane import StepLane


class AllLane(StepLane):
    """All sequences of the batch that can decode do so in every step. Beside them it takes new work."""

    kind = Lane.ALL

    def __init__(
        self, batch: Batch, shares: Shares, intake: Intake, policy: SchedulerPolicy
    ) -> None:
        super().__init__(batch, shares)
        self._intake = intake
        self._pacer = Pacer(policy.budget)

    def add_rows(self, draft: Draft) -> None:
        self._decode(draft, self._ready())

    def add_admitted(self, draft: Draft, sequence: Sequence) -> None:
        self._decode_admitted(draft, sequence)

    def add_new_work(self, draft: Draft, now: float) -> None:
        self._intake.begin(draft)
        num_decode, alone = len(draft.decode), self.turns.alone
        if alone or not self._pacer.pauses(num_decode):
            used, left = self._intake.schedule(draft, self.turns, now, bounded=num_decode > 0)
            if not alone:
                self._pacer.took(used, num_decode, self._batch.num_waiting + left)
        self._intake.add_masks(draft)

    def settle(self, draft: Draft, step_id: int) -> None:
        self._intake.settle(draft)
