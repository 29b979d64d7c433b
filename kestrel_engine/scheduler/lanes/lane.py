"""StepLane: one lane of steps. Owns its turns, and its steps that are out."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import ClassVar

from ...types.step import Lane, StepPlan
from ..batch import Batch, preemption_rank
from ..draft import Draft, ScheduledRow
from ..order.turns import Turns
from ..sequence import Phase, Sequence
from ..shares import Shares


@dataclass(slots=True)
class Out:
    """A step that is out. ``alone``: favoured sequences have it for themselves."""

    plan: StepPlan
    scheduled: list[ScheduledRow]
    alone: bool


class StepLane(abc.ABC):
    """The scheduler makes a draft, which the lane fills, and then launches the plan."""

    kind: ClassVar[Lane]

    def __init__(self, batch: Batch, shares: Shares) -> None:
        self._batch = batch
        self.turns = Turns(shares)
        self.out: deque[Out] = deque()
        """In the order of their launch."""

    @abc.abstractmethod
    def add_rows(self, draft: Draft) -> None:
        """Adds the rows of running sequences that decode."""

    @abc.abstractmethod
    def add_admitted(self, draft: Draft, sequence: Sequence) -> None:
        """Adds a sequence that was admitted meanwhile, if it can decode at once."""

    @abc.abstractmethod
    def add_new_work(self, draft: Draft, now: float) -> None:
        """Adds images, prompts and masks."""

    @abc.abstractmethod
    def settle(self, draft: Draft, step_id: int) -> None:
        """Completes a draft that is not empty."""

    def launched(self, plan: StepPlan, scheduled: list[ScheduledRow]) -> None:
        self.out.append(Out(plan, scheduled, self.turns.alone))
        self.turns.launched()

    def came_back(self, plan: StepPlan, new_work_s: float | None) -> list[ScheduledRow]:
        """Returns the rows of the oldest step that is out, which has come back. ``new_work_s``: the seconds of its
        images and prompts; None if it failed."""
        out = self.out.popleft()
        self.turns.ended(alone=out.alone)
        assert out.plan is plan, f"step {plan.step_id} came back before step {out.plan.step_id}"
        return out.scheduled

    def _ready(self) -> list[Sequence]:
        """The sequences that can decode, and whose turn it is."""
        return [s for s in self.turns.of(self._batch.running.values()) if s.can_decode]

    def _decode(self, draft: Draft, ready: Several[Sequence]) -> None:
        batch = self._batch
        if batch.num_free_pages < len(ready):
            # Pages may run out: the sequences that would be preempted last get theirs first.
            ready = sorted(ready, key=preemption_rank)
        served: set[int] = set()
        for sequence in ready:
            if sequence.phase is Phase.RUNNING and batch.grow(sequence, served):
                draft.add_decode(sequence)
                served.add(sequence.sequence_id)

    def _decode_admitted(self, draft: Draft, sequence: Sequence) -> None:
        if sequence.can_decode and self.turns.has_turn(sequence):
            draft.add_decode(sequence)
