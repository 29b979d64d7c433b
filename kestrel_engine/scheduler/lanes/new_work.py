"""NewWorkLane: steps that only encode, prefill and refine, beside decode steps."""

from __future__ import annotations

from ...types.step import Lane, StepPlan
from ..batch import Batch
from ..draft import Draft, ScheduledRow
from ..sequence import Sequence
from ..shares import Shares
from .beside import Beside, StepLoad
from .intake import Intake
from .lane import StepLane


class NewWorkLane(StepLane):
    """A large step delays no decoding. But its last image delays its first answer, so it is bounded, too."""

    kind = Lane.NEW_WORK

    def __init__(self, batch: Batch, shares: Shares, intake: Intake, beside: Beside) -> None:
        super().__init__(batch, shares)
        self._intake, self._beside = intake, beside
        self._load = StepLoad(0.0)
        """The step that is being made."""

    def add_rows(self, draft: Draft) -> None:
        """None: the other lane decodes."""

    def add_admitted(self, draft: Draft, sequence: Sequence) -> None:
        """None: the other lane decodes."""

    def add_new_work(self, draft: Draft, now: float) -> None:
        self._intake.begin(draft)
        used, _ = self._intake.schedule(draft, self.turns, now, bounded=True)
        self._intake.add_masks(draft)
        self._load = StepLoad(used)

    def settle(self, draft: Draft, step_id: int) -> None:
        self._intake.settle(draft)
        for item in draft.scheduled:
            item.sequence.steps_out.append(step_id)
        idle = [s.needs_prefill for s in self._batch.running.values() if not s.steps_out]
        num_waiting = self._batch.num_waiting + idle.count(True)
        self._load = self._load._replace(num_decoding=idle.count(False), num_waiting=num_waiting)
        draft.leave_room = self._beside.leaves_room(self._load)

    def launched(self, plan: StepPlan, scheduled: list[ScheduledRow]) -> None:
        super().launched(plan, scheduled)
        self._beside.launched_new_work(plan.step_id, self._load)

    def came_back(self, plan: StepPlan, new_work_s: float | None) -> list[ScheduledRow]:
        scheduled = super().came_back(plan, new_work_s)
        self._beside.ended(plan.step_id, new_work_s)
        for item in scheduled:
            self._batch.step_came_back(item.sequence, plan.step_id)
        return scheduled
