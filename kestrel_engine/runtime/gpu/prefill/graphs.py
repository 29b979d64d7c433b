"""PrefillGraphs: captured CUDA graphs of prefill passes over a few images and questions.

A pass has some 230 kernels. Launching them one by one takes the host longer than the device needs for the few tokens of
a question. A graph has a fixed number of image blocks and text tokens; shorter text is padded. The text's attention
reads tiles and page tables on the device, so one graph works for every mix of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.paged_text import TILE_QUERIES, TILE_WIDTH, paged_text
from ....types.adapter import Adapter
from ....types.progress import Progress
from ...kv_cache import KvCache
from ..adapters.pass_slabs import PassSlabs
from ..attention.blocks import BlockAttention
from ..attention.decode import PagedPrompts
from ..capture import captured
from ..room import leaving_room
from ..state.staging import Field, RowBuffers
from ..text.decoder import FusedText
from .batch import PrefillBatch

BLOCKS = (0, 1, 2, 3, 4, 5, 6)
"""The numbers of image blocks that are captured. Four blocks fill the GPU. A step completes at most six images with the
default number of crops, and a separate pass for one of them would run at half the speed."""
TEXT_ROWS = (32, 64, 96, 128, 192, 256)
"""The numbers of text tokens that are captured."""
MAX_BLOCKS, MAX_TEXT = BLOCKS[-1], TEXT_ROWS[-1]
LEAST_WITH_ROOM = 3
"""The fewest image blocks of a pass that may leave room. The kernels of a smaller one end soon."""
FEW_TOKENS = 64
"""The most text tokens without images that take the launches of a decode step. So few are bound by reading the weights,
which its kernels do faster than cuBLAS."""


class PassShape(NamedTuple):
    """The shape of a captured pass."""

    num_blocks: int
    text_rows: int
    adapters: bool = False
    """A row has an adapter."""
    with_room: bool = False
    """The pass leaves room for decode steps."""


def tiles_of(batch: PrefillBatch, seqs: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Returns the tiles of `paged_text` for the batch's text. Their row indices count from the first text token.

    ``seqs``: for each row of the pass, the row of its sequence in the page table.
    """
    tiles = []
    begin = len(batch.blocks) * batch.block_length
    for part in batch.text:
        for first in range(0, part.count, TILE_QUERIES):
            size = min(TILE_QUERIES, part.count - first)
            tiles.append((seqs[part.row], part.begin - begin + first, size, part.start + first))
    return tiles


def num_tiles(text_rows: int) -> int:
    """Returns the number of tiles in a pass: one for every four text tokens, which allows many short texts."""
    return text_rows // 4


class PrefillGraphs:
    """Owns the fixed buffers of captured passes. ``max_rows``: the most rows of a pass. Padding writes its keys and
    values to ``spare_slot``. ``anchor``: of the slabs of adapters; None if rows have none. ``with_room``: capture
    passes that leave room, too, which needs a device that can."""

    def __init__(
        self,
        text: FusedText,
        cache: KvCache,
        page_table: Tensor,
        *,
        block_length: int,
        max_rows: int,
        spare_slot: int,
        blocks: BlockAttention,
        stream: torch.cuda.Stream | None,
        anchor: Tensor | None = None,
        with_room: bool = False,
    ) -> None:
        self._text, self._cache, self._page_table = text, cache, page_table
        self._length, self._max_rows, self._spare_slot = block_length, max_rows, spare_slot
        self._stream = stream
        pool = cache.keys
        self._with_room = with_room
        longest = MAX_BLOCKS * block_length + MAX_TEXT
        dim = text.config.dim
        self._x = torch.zeros(longest, dim, dtype=text.dtype, device=pool.device)
        self._hidden = torch.zeros(max_rows, dim, dtype=text.dtype, device=pool.device)
        # One copy fills them all.
        self._inputs = RowBuffers(
            {
                "positions": Field(np.int64),
                "slots": Field(np.int64),
                "ids": Field(np.int64, rows=MAX_TEXT),
                "last": Field(np.int64, rows=max_rows),
                "tiles": Field(np.int32, (TILE_WIDTH,), rows=num_tiles(MAX_TEXT)),
            },
            longest,
            pool.device,
        )
        self._slabs: PassSlabs | None = None
        if anchor is not None:
            self._slabs = PassSlabs(anchor, longest, max_rows, pool.device)
        self._blocks = blocks
        self._few = text.few_tokens(
            PagedPrompts(page_table, cache.page_size),
            max_rows=FEW_TOKENS,
            page_size=cache.page_size,
        )
        self._graphs: dict[PassShape, torch.cuda.CUDAGraph] = {}

    def shape(self, batch: PrefillBatch, tiles: int, *, adapters: bool = False) -> PassShape | None:
        """Returns the smallest captured pass for ``batch`` with ``tiles`` tiles; None if there is none.

        A captured pass has no image later in a prompt, because its text attends causally.
        """
        if any(part.image is not None for part in batch.text):
            return None
        blocks, text = len(batch.blocks), sum(part.count for part in batch.text)
        if blocks > MAX_BLOCKS or len(batch.last) > self._max_rows:
            return None
        for rows in TEXT_ROWS:
            if text <= rows and tiles <= num_tiles(rows):
                return PassShape(blocks, rows, adapters)
        return None

    @property
    def hidden(self) -> Tensor:
        """The fixed output, [max_rows, dim]: the residual stream at the last position of each row."""
        return self._hidden

    def send(
        self,
        shape: PassShape,
        batch: PrefillBatch,
        tiles: list[tuple[int, int, int, int]],
        adapters: Sequence[Adapter | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """Enqueues the copy of the pass's inputs to the device. ``adapters``: those of the rows, for a shape with
        adapters.

        Returns the buffer [num_tokens, dim] that the caller fills with the batch's embeddings before `run`, and the ids
        [text tokens] int64 on the device.
        """
        count, rows = batch.num_tokens, len(batch.last)
        begin = len(batch.blocks) * batch.block_length
        total = shape.num_blocks * self._length + shape.text_rows
        host = self._inputs.host()
        host["positions"][:count] = batch.positions
        host["positions"][count:total] = 0
        host["slots"][:count] = batch.slots
        host["slots"][count:total] = self._spare_slot
        host["ids"][: count - begin] = batch.ids[begin:]
        host["last"][:rows] = batch.last
        host["last"][rows:] = 0
        meta = host["tiles"]
        meta[: len(tiles)] = tiles if tiles else np.empty((0, TILE_WIDTH), np.int32)
        meta[len(tiles) :] = 0
        self._inputs.send()
        if shape.adapters:
            assert self._slabs is not None
            rows_of_runs, sizes = zip(*batch.runs, strict=True)
            self._slabs.send([adapters[row] for row in rows_of_runs], total, sizes)
        return self._x[:count], self._inputs.device["ids"][: count - begin]

    def run(self, shape: PassShape, num_rows: int, *, leave_room: bool = False) -> Tensor:
        """Runs a captured pass and returns [num_rows, dim], the beginning of `hidden`. ``leave_room``: the pass that
        leaves room, where that exists.

        The result is valid until the next pass.
        """
        graph = self._graphs.get(shape._replace(with_room=leave_room)) or self._graphs.get(shape)
        if graph is None:
            self._body(shape)
        else:
            graph.replay()
        return self._hidden[:num_rows]

    def capture(self, progress: Progress | None = None) -> None:
        """Runs and captures every pass, the largest first. Requires a CUDA device."""
        pool = torch.cuda.graph_pool_handle()
        shapes = [
            PassShape(n, rows, adapters, with_room)
            for n in reversed(BLOCKS[: 1 + self._max_rows])
            for rows in reversed(TEXT_ROWS)
            for adapters in (False, True)[: 1 if self._slabs is None else 2]
            for with_room in (False, True)[: 2 if self._with_room and n >= LEAST_WITH_ROOM else 1]
        ]
        with torch.cuda.stream(self._stream):
            for name, array in self._inputs.host().items():
                array[:] = self._spare_slot if name == "slots" else 0
            self._inputs.send()
            if self._slabs is not None:
                self._slabs.send((), len(self._x))
        for index, shape in enumerate(shapes):
            with torch.cuda.stream(self._stream):
                self._x.normal_()
            with leaving_room() if shape.with_room else nullcontext():
                self._graphs[shape] = captured(partial(self._body, shape), self._stream, pool)
            if progress is not None:
                what = f"prefill graph of {shape.num_blocks} images, {shape.text_rows} tokens"
                progress(index + 1, len(shapes), what)

    def clear(self) -> None:
        self._graphs.clear()

    def _body(self, shape: PassShape) -> None:
        total = shape.num_blocks * self._length + shape.text_rows
        inputs = self._inputs.device
        slabs = self._slabs.of(total) if self._slabs is not None and shape.adapters else None
        if not shape.num_blocks and total <= FEW_TOKENS:
            rows = inputs["positions"][:total], inputs["slots"][:total], self._tiles_of(shape)
            pools = self._cache.keys, self._cache.values
            x = self._few(self._x[:total], *rows, *pools, adapters=slabs)
            torch.index_select(x, 0, inputs["last"], out=self._hidden)
            return
        hidden = self._text.prefill(
            self._x[:total],
            inputs["positions"][:total],
            inputs["slots"][:total],
            partial(self._attend, shape),
            self._cache.keys,
            self._cache.values,
            rows=inputs["last"],
            adapters=slabs,
        )
        self._hidden.copy_(hidden)

    def _attend(
        self, shape: PassShape, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """With its shape, a `TokenAttention`."""
        split = len(q) - shape.text_rows
        if split:
            rows = (each[:split] for each in (q, k, v, out))
            self._blocks((shape.num_blocks, self._length), *rows)
        # Rows of padding belong to no tile, so their output stays zero.
        paged_text(
            q[split:],
            self._cache.keys[layer],
            self._cache.values[layer],
            self._page_table,
            self._tiles_of(shape),
            page_size=self._cache.page_size,
            scales=self._cache.scales[layer],
            out=out[split:],
        )

    def _tiles_of(self, shape: PassShape) -> Tensor:
        return self._inputs.device["tiles"][: num_tiles(shape.text_rows)]
