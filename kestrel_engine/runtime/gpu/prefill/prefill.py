"""Prefill: computes the hidden states at the ends of prompt rows, with a captured pass if one fits.

Long prompts and large groups run without a graph, kernel by kernel. For a few tokens, launching the kernels takes the
host longer than the device computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ....models.moondream import Moondream
from ....types.adapter import Adapter
from ....types.model_config import ModelConfig
from ....types.progress import Progress
from ....types.requests import ImageBlock
from ....types.step import Row
from ...kv_cache import KvCache
from ..adapters.pass_slabs import PassAdapters, Places, changing_attention, pass_adapters
from ..attention.prefill import AttentionChoice, PrefillAttention
from ..footprint import PASS_POSITIONS
from ..state.staging import Uploader
from ..text.decoder import FusedText
from ..vision.encoded_images import EncodedImages
from .batch import PrefillBatch, prefill_batch
from .graphs import MAX_BLOCKS, MAX_TEXT, PrefillGraphs, tiles_of

WARM_UP_POSITIONS = (1, 16, 17, 300, 730, 2000)
"""One number of positions for every variant of a prefill kernel that is compiled separately."""


class Prefill:
    """The prefill passes of a runtime. ``graphs``: None to launch all kernels one by one. ``spare_slot``: the first
    slot of the spare page, which no sequence reads. ``anchor``: of the slabs of adapters; None if rows have none."""

    def __init__(
        self,
        config: ModelConfig,
        model: Moondream,
        text: FusedText,
        cache: KvCache,
        images: EncodedImages,
        attention: AttentionChoice,
        upload: Uploader,
        graphs: PrefillGraphs | None,
        *,
        spare_slot: int,
        anchor: Tensor | None = None,
    ) -> None:
        self._config, self._model, self._text, self._cache = config, model, text, cache
        self._images, self._attention, self._upload = images, attention, upload
        self._graphs, self._spare_slot, self._anchor = graphs, spare_slot, anchor

    def passes(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Groups rows into passes: as many rows as a captured pass holds, or PASS_POSITIONS positions."""
        if self._graphs is None:
            return plain_passes(rows, PASS_POSITIONS)
        return captured_passes(
            rows, self._config.image_prefix, max_blocks=MAX_BLOCKS, max_text=MAX_TEXT
        )

    def run(
        self, rows: Sequence[Row], seqs: Sequence[int] | None, *, leave_room: bool = False
    ) -> Tensor:
        """Runs one pass and returns [num_rows, dim], the residual stream at each row's last position.

        ``seqs``: the rows' indices in the device's page table, which holds their pages; None for a pass without a
        graph. ``leave_room``: as in StepPlan. The result is valid until the next pass.
        """
        batch = prefill_batch(rows, self._cache.page_size, self._config.image_prefix)
        adapters = [row.adapter for row in rows]
        has_adapters = any(adapters)
        if self._graphs is not None and seqs is not None:
            tiles = tiles_of(batch, seqs)
            shape = self._graphs.shape(batch, len(tiles), adapters=has_adapters)
            if shape is not None:
                embeddings, ids = self._graphs.send(shape, batch, tiles, adapters)
                self._embed(batch, embeddings, ids, self._arrays(batch))
                return self._graphs.run(shape, len(rows), leave_room=leave_room)
        arrays = self._arrays(batch, "ids", "positions", "slots", "last")
        x = torch.empty(
            batch.num_tokens,
            self._config.text.dim,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        self._embed(batch, x, arrays["ids"], arrays)
        keys, values = self._cache.keys, self._cache.values
        attention = PrefillAttention(
            self._attention, batch, keys, values, self._cache.page_size, self._cache.scales
        )
        places = arrays["positions"], arrays["slots"]
        slabs = self._slabs(batch, adapters) if has_adapters else None
        return self._text.prefill(
            x, *places, attention, keys, values, rows=arrays["last"], adapters=slabs
        )

    @property
    def fixed_hidden(self) -> Tensor | None:
        """The buffer [max_rows, dim] with which the results of captured passes begin; None without such passes."""
        return None if self._graphs is None else self._graphs.hidden

    def warm_up(self) -> None:
        """Runs every kind of pass that is compiled separately. The passes write to the spare page."""
        size, dim = self._cache.page_size, self._config.text.dim
        for count in WARM_UP_POSITIONS:
            x = torch.randn(count, dim, dtype=self._model.dtype, device=self._model.device)
            places = torch.arange(count, device=x.device) % size
            slots = places + self._spare_slot
            pool = self._cache.keys, self._cache.values
            self._text.prefill(x, places, slots, _no_attention, *pool)
            if self._anchor is not None:
                none = self._upload_slabs([None], [count])
                self._text.prefill(x, places, slots, _no_attention, *pool, adapters=none)

    def capture(self, progress: Progress | None) -> None:
        if self._graphs is not None:
            self._graphs.capture(progress)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _arrays(self, batch: PrefillBatch, *names: str) -> dict[str, Tensor]:
        """Returns the named arrays of the batch, and its coordinates and sizes, if any, on the device."""
        arrays: dict[str, np.ndarray] = {name: getattr(batch, name) for name in names}
        if "ids" in arrays:
            arrays["ids"] = batch.ids[len(batch.blocks) * batch.block_length :]
        for name in ("coord_places", "coord_values", "size_places", "size_values"):
            if len(getattr(batch, name)):
                arrays[name] = getattr(batch, name)
        return self._upload(arrays) if arrays else {}

    def _slabs(self, batch: PrefillBatch, adapters: Sequence[Adapter | None]) -> PassAdapters:
        """Returns the slabs of the batch's tokens. ``adapters``: those of the rows."""
        rows, sizes = zip(*batch.runs, strict=True)
        return self._upload_slabs([adapters[row] for row in rows], sizes)

    def _upload_slabs(
        self, adapters: Sequence[Adapter | None], sizes: Sequence[int]
    ) -> PassAdapters:
        assert self._anchor is not None, "this runtime computes no adapters"
        places = Places.of(adapters, self._anchor).repeated(sizes)
        arrays = {name: np.array(each, dtype=np.int32) for name, each in places.rows.items()}
        arrays["slabs"] = np.array([*places.slabs, 0], dtype=np.int64)
        on_device = self._upload(arrays)
        slabs, attention = on_device.pop("slabs"), changing_attention(adapters)
        return pass_adapters(self._anchor, slabs, on_device, attention=attention)

    def _embed(
        self, batch: PrefillBatch, x: Tensor, ids: Tensor, arrays: Mapping[str, Tensor]
    ) -> None:
        """Writes the batch's embeddings to ``x`` [num_tokens, dim]. ``ids``: those behind the image prefixes."""
        length, region = batch.block_length, self._model.region
        for index, key in enumerate(batch.blocks):
            x[index * length : (index + 1) * length] = self._images.prefix(key)
        text = len(batch.blocks) * length
        if text < len(x):
            torch.index_select(self._model.text.wte, 0, ids, out=x[text:])
        if "coord_places" in arrays:
            x[arrays["coord_places"]] = region.embed_coords(arrays["coord_values"])
        if "size_places" in arrays:
            x[arrays["size_places"]] = region.embed_sizes(arrays["size_values"])
        for part in batch.text:
            if part.image is not None:
                x[part.begin : part.begin + part.count] = self._images.prefix(part.image)[1:]


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    out.zero_()


def row_size(row: Row) -> tuple[int, int]:
    """Returns how many image prefixes (0 or 1) a row has, and how many positions, later images included."""
    positions = sum(t.num_positions if isinstance(t, ImageBlock) else 1 for t in row.tokens)
    begins = row.start == 0 and len(row.tokens) > 1 and isinstance(row.tokens[1], ImageBlock)
    return int(begins), positions


def captured_passes(
    rows: Sequence[Row], block_length: int, *, max_blocks: int, max_text: int
) -> Iterator[list[Row]]:
    """Groups rows, in order, into as few groups as possible.

    A group has at most ``max_blocks`` image prefixes of ``block_length`` positions and at most ``max_text`` other
    positions. A row that exceeds these limits is a group of its own. Blocks are distributed evenly, because a single
    block runs at half the speed of four blocks.
    """
    blocks = sum(row_size(row)[0] for row in rows)
    even = math.ceil(blocks / max(1, math.ceil(blocks / max_blocks)))
    group: list[Row] = []
    held_blocks = held_text = 0
    for row in rows:
        own_blocks, positions = row_size(row)
        text = positions - own_blocks * block_length
        if group and (held_blocks + own_blocks > even or held_text + text > max_text):
            yield group
            group, held_blocks, held_text = [], 0, 0
        group.append(row)
        held_blocks += own_blocks
        held_text += text
    if group:
        yield group


def plain_passes(rows: Sequence[Row], max_positions: int) -> Iterator[list[Row]]:
    """Groups rows, in order, into groups of at most ``max_positions``. A longer row is a group of its own."""
    group: list[Row] = []
    held = 0
    for row in rows:
        _, positions = row_size(row)
        if group and held + positions > max_positions:
            yield group
            group, held = [], 0
        group.append(row)
        held += positions
    if group:
        yield group
