"""DecodeLane: steps that only decode, beside new work or after it (beside.py)."""

from __future__ import annotations

from ...types.step import Lane, StepPlan
from ..batch import Batch
from ..draft import Draft, ScheduledRow
from ..sequence import Sequence
from ..shares import Shares
from .beside import Beside
from .lane import StepLane


class DecodeLane(StepLane):
    """Each step computes the sequences that ``beside`` chooses."""

    kind = Lane.DECODE

    def __init__(self, batch: Batch, shares: Shares, beside: Beside) -> None:
        super().__init__(batch, shares)
        self._beside = beside

    def add_rows(self, draft: Draft) -> None:
        ready, after = self._beside.choose(self._ready(), self._batch.running.values())
        self._decode(draft, ready)
        draft.after = after if draft.decode else None

    def add_admitted(self, draft: Draft, sequence: Sequence) -> None:
        # Beside rows that wait for a step, it would wait for that step as well.
        if draft.after is None:
            self._decode_admitted(draft, sequence)

    def add_new_work(self, draft: Draft, now: float) -> None:
        """None: the other lane has it."""

    def settle(self, draft: Draft, step_id: int) -> None:
        if draft.after is None:
            draft.spacing_s = self._beside.spacing_s

    def launched(self, plan: StepPlan, scheduled: list[ScheduledRow]) -> None:
        super().launched(plan, scheduled)
        self._beside.launched(plan.after)
