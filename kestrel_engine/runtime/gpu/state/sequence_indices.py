"""SequenceIndices: assigns each running sequence an index into the device's per-sequence state.

For each index, the device holds a page table and the last sampled token. This class records which pages the device's
page table already holds, so only changed entries are copied. It works on plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....types.step import Row


@dataclass(slots=True)
class TableUpdates:
    """Entries of the flat page table [num_sequences * max_pages] to write before a pass."""

    indices: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    def add(self, first: int, pages: Sequence[int]) -> None:
        self.indices.extend(range(first, first + len(pages)))
        self.pages.extend(pages)


class SequenceIndices:
    """The indices 0 to ``capacity`` - 1, for sequences of at most ``max_pages`` pages.

    A sequence that was in none of the last ``keep`` steps may lose its index to another one, unless a step that is out
    holds it. By then the host knows its sampled token, and its page table is copied again when the sequence returns.
    """

    def __init__(self, capacity: int, max_pages: int, *, keep: int = 4) -> None:
        self.capacity, self.max_pages, self._keep = capacity, max_pages, keep
        self._by_sequence: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._tables: list[tuple[int, ...]] = [()] * capacity
        self._last_steps: list[int] = [0] * capacity
        self._owners: list[int] = [-1] * capacity
        self._held: dict[int, tuple[int, ...]] = {}
        """The indices that steps hold, by step id."""

    def release(self, sequence_id: int) -> None:
        """Frees the index of a sequence. An unknown id has no effect."""
        index = self._by_sequence.pop(sequence_id, None)
        if index is not None:
            self._tables[index] = ()
            self._free.append(index)

    def hold(self, indices: Sequence[int], step_id: int) -> None:
        """Keeps ``indices`` for their sequences until `unhold`, however many steps are launched meanwhile."""
        self._held[step_id] = (*self._held.get(step_id, ()), *indices)

    def unhold(self, step_id: int) -> None:
        """Ends the hold of a step. An unknown step has no effect."""
        self._held.pop(step_id, None)

    def assign(self, row: Row, step_id: int, updates: TableUpdates) -> int:
        """Returns the index of the row's sequence. Adds page table entries that the device lacks to ``updates``."""
        index = self._by_sequence.get(row.sequence_id)
        if index is None:
            index = self._by_sequence[row.sequence_id] = self._allocate(step_id)
            self._owners[index] = row.sequence_id
        self._last_steps[index] = step_id
        known, table = self._tables[index], row.page_table
        if table is not known:
            count = len(known)
            if table[:count] == known:
                updates.add(index * self.max_pages + count, table[count:])
            else:
                updates.add(index * self.max_pages, table)
            self._tables[index] = table
        return index

    def _allocate(self, step_id: int) -> int:
        """Returns a free index, or that of the sequence whose last step is the oldest."""
        if self._free:
            return self._free.pop()
        held = {index for indices in self._held.values() for index in indices}
        free = (index for index in range(self.capacity) if index not in held)
        index = min(free, key=self._last_steps.__getitem__)
        assert self._last_steps[index] < step_id - self._keep, (
            f"all {self.capacity} sequence indices were used within {self._keep} steps"
        )
        del self._by_sequence[self._owners[index]]
        self._tables[index] = ()
        return index
