"""SequenceState: the page table and the last sampled token of each running sequence, on the device.

A sequence has an index into both. Only changed entries of a page table are copied to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....kernels.decode_io import SampledTokens
from ....types.step import Row, RuntimeLimits, SampleSpec
from .staging import Field, RowBuffers, Uploader


@dataclass(slots=True)
class TableUpdates:
    """Entries of the flat page table [num_sequences * max_pages] to write before a pass."""

    indices: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    def add(self, first: int, pages: Sequence[int]) -> None:
        self.indices.extend(range(first, first + len(pages)))
        self.pages.extend(pages)


class SequenceIndices:
    """The indices 0 to ``capacity`` - 1, for sequences of at most ``max_pages`` pages. It works on plain integers, and
    notes which pages the device's page table already holds, so that only changed entries are copied.

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


STAGED_ENTRIES = 256
"""The most page table entries that fixed buffers copy: those of three new sequences with an image."""


class SequenceState:
    """``page_table``: [num_sequences + 1, max_pages] int32. ``sampled``: the last sampled tokens. Both are on
    ``device``. No sequence has the index ``spare``: rows of padding use it, and its page table names only the spare
    page, ``limits.num_pages``."""

    def __init__(self, limits: RuntimeLimits, device: torch.device, upload: Uploader) -> None:
        self._limits, self._upload = limits, upload
        self.max_pages = -(-limits.max_seq_length // limits.page_size) + 1
        self._indices = SequenceIndices(2 * limits.max_batch_size + 2, self.max_pages)
        self.spare = self._indices.capacity
        self.page_table = torch.full(
            (self.spare + 1, self.max_pages), limits.num_pages, dtype=torch.int32, device=device
        )
        self.sampled = SampledTokens.empty(self.spare + 1, device)
        fields = {"indices": Field(np.int64), "pages": Field(np.int32)}
        self._entries = RowBuffers(fields, STAGED_ENTRIES, device)
        self._reads_value = [False] * (self.spare + 1)

    def assign(self, rows: Sequence[Row], step_id: int, *, hold: bool = False) -> list[int]:
        """Returns the sequence index of each row of a prompt. Enqueues the copy of page table entries that the device
        lacks.

        ``hold``: no other sequence gets these indices before `unhold`.
        """
        updates = TableUpdates()
        seqs = [self._indices.assign(row, step_id, updates) for row in rows]
        if hold:
            self._indices.hold(seqs, step_id)
        self._send_staged(updates)
        return seqs

    def unhold(self, step_id: int) -> None:
        self._indices.unhold(step_id)

    def assign_decoding(
        self, rows: Sequence[Row], step_id: int, new_pages: np.ndarray
    ) -> list[int]:
        """As `assign`, but a row's single new page goes into ``new_pages``, and the pass itself writes it.

        ``new_pages``: [len(rows), 2] int32, filled with -1 by the caller. An entry becomes the index of the flat page
        table, and the page. A separate copy would release the GIL a dozen times. Each time, the step may wait
        milliseconds for it.
        """
        updates = TableUpdates()
        seqs = []
        for index, row in enumerate(rows):
            known = len(updates.indices)
            seqs.append(self._indices.assign(row, step_id, updates))
            if len(updates.indices) == known + 1:
                new_pages[index] = updates.indices.pop(), updates.pages.pop()
        self._send(updates)
        return seqs

    def _send(self, updates: TableUpdates) -> None:
        if updates.indices:
            on_device = self._upload(
                {
                    "indices": np.array(updates.indices, dtype=np.int64),
                    "pages": np.array(updates.pages, dtype=np.int32),
                }
            )
            self._write(on_device["indices"], on_device["pages"])

    def _send_staged(self, updates: TableUpdates) -> None:
        """As `_send`, with half as many calls if the entries fit the fixed buffers. Only one lane may use these."""
        count = len(updates.indices)
        if not 0 < count <= STAGED_ENTRIES:
            self._send(updates)
            return
        host, on_device = self._entries.host(), self._entries.device
        host["indices"][:count] = updates.indices
        host["pages"][:count] = updates.pages
        self._entries.send()
        self._write(on_device["indices"][:count], on_device["pages"][:count])

    def _write(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        self.page_table.view(-1).index_copy_(0, indices, pages)

    def release(self, sequence_id: int) -> None:
        self._indices.release(sequence_id)

    def check(self, row: Row) -> None:
        """Raises AssertionError for a prompt row whose pages do not exist."""
        assert len(row.page_table) <= self.max_pages, (
            f"sequence {row.sequence_id}: {len(row.page_table)} pages, limit {self.max_pages}"
        )
        last = self._limits.num_pages - 1
        assert row.page_table and 0 <= min(row.page_table) <= max(row.page_table) <= last, (
            f"sequence {row.sequence_id}: pages outside 0..{last}"
        )

    def may_hold_value(self, seq: int) -> bool:
        """Returns whether the last token of the sequence with index ``seq`` may be a coordinate or a size."""
        return self._reads_value[seq]

    def note_rules(self, seqs: Sequence[int], specs: Sequence[SampleSpec]) -> bool:
        """Records which sequences may sample a value next. Returns True if any may."""
        any_reads = False
        for seq, spec in zip(seqs, specs, strict=True):
            reads = spec.rule.read_coord or spec.rule.read_size
            self._reads_value[seq] = reads
            any_reads = any_reads or reads
        return any_reads
