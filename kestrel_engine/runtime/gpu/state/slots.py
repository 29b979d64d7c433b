"""SequenceSlots: which slot of the device's per-sequence state belongs to whom, and which pages it has been told of.

The device keeps for each slot a page table and the last sampled token; only what changed crosses the bus. Ints only;
knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....types.step import Row


@dataclass(slots=True)
class TableUpdates:
    """Entries of the flat page table [slots * max_pages] to be written before a pass."""

    indices: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    def add(self, first: int, pages: Sequence[int]) -> None:
        self.indices.extend(range(first, first + len(pages)))
        self.pages.extend(pages)


class SequenceSlots:
    """``capacity`` slots of ``max_pages`` pages. A sequence that was not in the last ``keep`` steps may lose its slot:
    what it sampled is known to the host by then, and its page table is sent anew when it comes back."""

    def __init__(self, capacity: int, max_pages: int, *, keep: int = 4) -> None:
        self.capacity, self.max_pages, self._keep = capacity, max_pages, keep
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._tables: list[tuple[int, ...]] = [()] * capacity
        self._used: list[int] = [0] * capacity
        self._owners: list[int] = [-1] * capacity

    def release(self, sequence_id: int) -> None:
        """An unknown id is fine."""
        slot = self._slots.pop(sequence_id, None)
        if slot is not None:
            self._tables[slot] = ()
            self._free.append(slot)

    def place(self, row: Row, step_id: int, updates: TableUpdates) -> int:
        """The row's slot; what the device does not know of its page table goes into ``updates``."""
        slot = self._slots.get(row.sequence_id)
        if slot is None:
            slot = self._slots[row.sequence_id] = self._take(step_id)
            self._owners[slot] = row.sequence_id
        self._used[slot] = step_id
        known, table = self._tables[slot], row.page_table
        if table is not known:
            count = len(known)
            if table[:count] == known:
                updates.add(slot * self.max_pages + count, table[count:])
            else:
                updates.add(slot * self.max_pages, table)
            self._tables[slot] = table
        return slot

    def _take(self, step_id: int) -> int:
        if self._free:
            return self._free.pop()
        slot = min(range(self.capacity), key=self._used.__getitem__)
        assert self._used[slot] < step_id - self._keep, (
            f"{self.capacity} slots, and all were used within {self._keep} steps"
        )
        del self._slots[self._owners[slot]]
        self._tables[slot] = ()
        return slot
