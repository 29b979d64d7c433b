"""WaitingQueue: who is next. Owns the order of those who wait: priority, age, arrival.

First in, first out within a priority. Between priorities the head with the best priority wins, where waiting
``aging_s`` seconds is worth one step of priority, so nobody starves. No operation costs more the longer the queue is.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from .sequence import NUM_PRIORITIES, Sequence


class WaitingQueue:
    """Sequences in order, some of them parked until a picture's prefix is there."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._levels: list[OrderedDict[int, Sequence]] = [
            OrderedDict() for _ in range(NUM_PRIORITIES)
        ]
        self._parked: dict[Hashable, OrderedDict[int, Sequence]] = {}
        self._parked_at: dict[int, Hashable] = {}
        self._deadlines: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._levels)) + len(self._parked_at)

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels:
            yield from level.values()
        for parked in self._parked.values():
            yield from parked.values()

    @property
    def has_ready(self) -> bool:
        """Whether anybody waits who is not parked."""
        return any(self._levels)

    def add(self, sequence: Sequence) -> None:
        """At the end of its priority."""
        self._levels[sequence.priority][sequence.sequence_id] = sequence
        if sequence.deadline_at is not None:
            heapq.heappush(
                self._deadlines, (sequence.deadline_at, sequence.sequence_id, sequence.priority)
            )

    def add_first(self, sequence: Sequence) -> None:
        """At the head of its priority: it was taken before."""
        level = self._levels[sequence.priority]
        level[sequence.sequence_id] = sequence
        level.move_to_end(sequence.sequence_id, last=False)

    def head(self, now: float) -> Sequence | None:
        """The next to be taken."""
        heads = [next(iter(level.values())) for level in self._levels if level]
        return min(
            heads, key=lambda s: s.priority - (now - s.arrived_at) / self._aging_s, default=None
        )

    def remove(self, sequence_id: int) -> Sequence | None:
        """Takes one out wherever it waits; None if it doesn't."""
        if sequence_id in self._parked_at:
            reason = self._parked_at.pop(sequence_id)
            sequence = self._parked[reason].pop(sequence_id)
            if not self._parked[reason]:
                del self._parked[reason]
            return sequence
        for level in self._levels:
            if sequence_id in level:
                return level.pop(sequence_id)
        return None

    def park(self, sequence: Sequence, reason: Hashable) -> None:
        """Sets a waiting sequence aside until release(reason)."""
        del self._levels[sequence.priority][sequence.sequence_id]
        self._parked.setdefault(reason, OrderedDict())[sequence.sequence_id] = sequence
        self._parked_at[sequence.sequence_id] = reason

    def release(self, reason: Hashable) -> None:
        """Puts those parked for ``reason`` back at the head of their priorities, in their order."""
        parked = self._parked.pop(reason, None)
        for sequence in reversed(parked.values() if parked else ()):
            del self._parked_at[sequence.sequence_id]
            self.add_first(sequence)

    def expired(self, now: float) -> list[int]:
        """Ids of those for whom nothing was computed yet and whose deadline has passed; each is named once."""
        ids = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence_id, priority = heapq.heappop(self._deadlines)
            sequence = self._levels[priority].get(sequence_id)
            if sequence is None and sequence_id in self._parked_at:
                sequence = self._parked[self._parked_at[sequence_id]][sequence_id]
            if sequence is not None and sequence.admitted_at is None:
                ids.append(sequence_id)
        return ids
