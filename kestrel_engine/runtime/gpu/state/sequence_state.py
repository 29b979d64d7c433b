"""SequenceState: what the device keeps of each running sequence: its page table and what it sampled last.

A sequence has a slot of both. Only what changed of a page table crosses the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....kernels.decode_io import SampledTokens
from ....types.step import Row, RuntimeLimits, SampleSpec
from .slots import SequenceSlots, TableUpdates
from .staging import Uploader


class SequenceState:
    """``page_table`` [slots + 1, max_pages] int32 and ``sampled``, both on ``device``. Slot ``spare`` is nobody's:
    rows of padding use it, and its pages are the one page beyond ``limits.num_pages``."""

    def __init__(self, limits: RuntimeLimits, device: torch.device, upload: Uploader) -> None:
        self._limits, self._upload = limits, upload
        self.max_pages = -(-limits.max_seq_length // limits.page_size) + 1
        self._slots = SequenceSlots(2 * limits.max_batch_size + 2, self.max_pages)
        self.spare = self._slots.capacity
        self.page_table = torch.full(
            (self.spare + 1, self.max_pages), limits.num_pages, dtype=torch.int32, device=device
        )
        self.sampled = SampledTokens.empty(self.spare + 1, device)
        self._reads_value = [False] * (self.spare + 1)

    def place(self, rows: Sequence[Row], step_id: int) -> list[int]:
        """Each row's slot. Enqueues what the device does not know of their page tables."""
        updates = TableUpdates()
        slots = [self._slots.place(row, step_id, updates) for row in rows]
        self._send(updates)
        return slots

    def place_decoding(self, rows: Sequence[Row], step_id: int, new_pages: np.ndarray) -> list[int]:
        """As `place`, but one new page of a row goes into ``new_pages`` [len(rows), 2] int32, which holds -1, for the
        pass itself to write: a place of the flat page table, and the page. Apart, it cost a dozen calls that each give
        the interpreter up, and a step waited milliseconds to get it back while images were decoded."""
        updates = TableUpdates()
        slots = []
        for index, row in enumerate(rows):
            known = len(updates.indices)
            slots.append(self._slots.place(row, step_id, updates))
            if len(updates.indices) == known + 1:
                new_pages[index] = updates.indices.pop(), updates.pages.pop()
        self._send(updates)
        return slots

    def _send(self, updates: TableUpdates) -> None:
        if updates.indices:
            there = self._upload(
                {
                    "indices": np.array(updates.indices, dtype=np.int64),
                    "pages": np.array(updates.pages, dtype=np.int32),
                }
            )
            self.page_table.view(-1).index_copy_(0, there["indices"], there["pages"])

    def release(self, sequence_id: int) -> None:
        """An unknown id is fine."""
        self._slots.release(sequence_id)

    def check(self, row: Row) -> None:
        """Raises AssertionError for a prompt row whose pages are not there."""
        assert len(row.page_table) <= self.max_pages, (
            f"sequence {row.sequence_id}: {len(row.page_table)} pages, limit {self.max_pages}"
        )
        last = self._limits.num_pages - 1
        assert row.page_table and 0 <= min(row.page_table) <= max(row.page_table) <= last, (
            f"sequence {row.sequence_id}: pages outside 0..{last}"
        )

    def may_hold_value(self, slot: int) -> bool:
        """Whether the slot's last sampled token may be a coordinate or a size."""
        return self._reads_value[slot]

    def note_rules(self, slots: Sequence[int], specs: Sequence[SampleSpec]) -> bool:
        """Remembers which slots sample values next; True if any does."""
        any_reads = False
        for slot, spec in zip(slots, specs, strict=True):
            reads = spec.rule.read_coord or spec.rule.read_size
            self._reads_value[slot] = reads
            any_reads = any_reads or reads
        return any_reads
