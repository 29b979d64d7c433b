"""Beside: which sequences a step of the lane DECODE computes, and for which step of NEW_WORK it waits.

Beside new work, decode steps hold fewer rows than after it, and take nearly as long as with more rows. So with a small
batch both together take longer than one after the other. Therefore decoding waits for a step of NEW_WORK that takes
less time than the target for the gap between tokens, or three times as long while few rows decode, and runs beside a
longer one.

Under load, the longer one leaves a part of the device to the decode steps. These then take less time beside it, and
would follow one another with fewer rows each. So they are spaced: fewer of them leave more of the device to new work.
docs/lab/measurements.md (Decoding beside images) has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..sequence import Sequence

_FEW_ROWS = 5
_MORE_FOR_FEW = 3.0
"""While fewer than _FEW_ROWS rows decode, they wait for steps that take so many times the target."""
MANY_DECODING = 12
MANY_WAITING = 12
"""The fewest sequences that decode, and the fewest that wait for further new work, when a step leaves room. If fewer
wait, answers that take longer to decode leave the device idle."""
SPACING = 0.55
"""The time from the start of a decode step to that of the next one, beside new work that leaves room, as a share of the
target. A token also waits for the step, and for the host."""
_NEW_SAMPLE = 0.2
"""The weight of a new measurement in the mean of the seconds that new work takes."""


class StepLoad(NamedTuple):
    """A step of NEW_WORK, and what there is besides. ``used``: the share of a step's allowance."""

    used: float
    num_decoding: int = 0
    """Sequences that decode meanwhile."""
    num_waiting: int = 0
    """Sequences that need new work and are in no step."""


@dataclass(slots=True)
class _NewWork:
    """A step of NEW_WORK that is out."""

    used: float
    """The share of a step's allowance."""
    is_short: bool
    leaves_room: bool
    beside: bool = False
    """A decode step may have run at the same time, so that the device took longer."""


class Beside:
    """Owns the steps of NEW_WORK that are out, as decode steps see them. Steps of NEW_WORK end in order.

    ``itl_target_s``: seconds between two tokens that new work may cause. ``room``: new work can leave room.
    """

    def __init__(self, itl_target_s: float, *, room: bool = False) -> None:
        self._target_s, self._room = itl_target_s, room
        self._out: dict[int, _NewWork] = {}
        self._waited_for = -1
        """The last step of NEW_WORK for which a decode step waits. Later decode steps run after it, too."""
        self._s_per_allowance = 0.0
        """The mean of the seconds of a step that uses its whole allowance; 0 until a step was measured."""

    def is_short(self, load: StepLoad) -> bool:
        """Returns whether decoding waits for a step of NEW_WORK."""
        limit_s = self._target_s * (_MORE_FOR_FEW if load.num_decoding < _FEW_ROWS else 1.0)
        return self._s_per_allowance * load.used <= limit_s

    def leaves_room(self, load: StepLoad) -> bool:
        """Returns whether a step of NEW_WORK leaves room for decode steps."""
        many = load.num_decoding >= MANY_DECODING and load.num_waiting >= MANY_WAITING
        return self._room and many and not self.is_short(load)

    def launched_new_work(self, step_id: int, load: StepLoad) -> None:
        self._out[step_id] = _NewWork(load.used, self.is_short(load), self.leaves_room(load))

    @property
    def spacing_s(self) -> float:
        """The fewest seconds between the starts of two decode steps, if the second does not wait for new work."""
        _, work = self._oldest()
        return SPACING * self._target_s if work is not None and work.leaves_room else 0.0

    def launched(self, after: int | None) -> None:
        """Notes a decode step that waits for the step ``after``."""
        if after is not None:
            self._waited_for = max(self._waited_for, after)
        for step_id, work in self._out.items():
            work.beside |= step_id > self._waited_for

    def ended(self, step_id: int, seconds: float | None) -> None:
        """Notes that a step of NEW_WORK has come back. ``seconds``: that the device took; None if it failed."""
        work = self._out.pop(step_id)
        if seconds is None or work.beside or work.used < 0.1:
            return
        found = seconds / work.used
        old = self._s_per_allowance or found
        self._s_per_allowance = old + _NEW_SAMPLE * (found - old)

    @property
    def is_beside(self) -> bool:
        """Whether the next decode step runs beside new work, for which it does not wait."""
        _, work = self._oldest()
        return work is not None and not work.is_short

    def _oldest(self) -> tuple[int, _NewWork | None]:
        """The oldest step for which no decode step waits. To wait for a short step behind a long one is to wait for
        both."""
        found = ((i, work) for i, work in self._out.items() if i > self._waited_for)
        return next(found, (-1, None))

    def choose(
        self, ready: list[Sequence], running: Iterable[Sequence]
    ) -> tuple[list[Sequence], int | None]:
        """Chooses from ``ready``, the sequences that can decode. Returns the chosen ones, and the step of NEW_WORK that
        must run before their step, if any.

        A sequence can decode while the step that computes its prompt is out. If its decode step waits for that one, the
        device need not wait for the host between the two. But the lane waits as well. So this is done for a short step,
        and for a longer one only while no other sequence of ``running`` decodes.
        """
        step_id, work = self._oldest()
        after = step_id if work is not None and work.is_short else None
        last = max(self._waited_for, -1 if after is None else after)
        free = [s for s in ready if not s.steps_out or s.steps_out[-1] <= last]
        if free or any(not s.steps_out and not s.needs_prefill for s in running):
            return free, after
        if not ready:
            return [], None
        oldest = min(sequence.steps_out[-1] for sequence in ready)
        return [sequence for sequence in ready if sequence.steps_out[-1] == oldest], oldest
