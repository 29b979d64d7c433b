"""Prefill: rows of prompt tokens to the hidden states at their ends, by captured passes where one fits.

Long prompts and large groups run launch by launch, which costs the host more than a few tokens cost the device: an
answer about a repeated image took 12.3 ms so, and takes 5.7 (H200).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ....models.moondream import Moondream
from ....types.model_config import ModelConfig
from ....types.step import Row
from ...kv_cache import KvCache
from ..attention.prefill import AttentionChoice, PrefillAttention
from ..footprint import PASS_POSITIONS
from ..graphs import Progress
from ..state.staging import Uploader
from ..text.decoder import FusedText
from ..vision.images import EncodedImages
from .batch import PrefillBatch, prefill_batch
from .graphs import MAX_BLOCKS, MAX_TEXT, PrefillGraphs, tiles_of
from .passes import captured_passes, plain_passes, row_size

WARM_UP_POSITIONS = (1, 16, 17, 300, 730, 2000)
"""One size of every class for which a prefill kernel is compiled apart."""


class Prefill:
    """``graphs``: None launches every pass's kernels one by one. ``spare_slot``: the first of the page that nobody
    reads."""

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
    ) -> None:
        self._config, self._model, self._text, self._cache = config, model, text, cache
        self._images, self._attention, self._upload = images, attention, upload
        self._graphs, self._spare_slot = graphs, spare_slot

    def passes(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Rows in groups that run together: as many as a captured pass holds, or PASS_POSITIONS positions."""
        if self._graphs is None:
            return plain_passes(rows, PASS_POSITIONS)
        return captured_passes(
            rows, self._config.image_prefix, max_blocks=MAX_BLOCKS, max_text=MAX_TEXT
        )

    def run(self, rows: Sequence[Row], seqs: Sequence[int] | None) -> Tensor:
        """[num_rows, dim]: the residual stream at each row's last position. ``seqs``: the rows' places in the device's
        page table, where their pages are known; None keeps to plain launches. Good until the next pass."""
        batch = prefill_batch(rows, self._cache.page_size, self._config.image_prefix)
        if self._graphs is not None and seqs is not None:
            with_text = [seq for seq, row in zip(seqs, rows, strict=True) if _has_text(row)]
            tiles = tiles_of(batch, with_text)
            shape = self._graphs.shape(batch, len(tiles))
            if shape is not None:
                self._fill(batch, self._graphs.room(batch.num_tokens), self._arrays(batch, "ids"))
                return self._graphs.run(shape, batch, tiles)
        there = self._arrays(batch, "ids", "positions", "slots", "last")
        x = torch.empty(
            batch.num_tokens,
            self._config.text.dim,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        self._fill(batch, x, there)
        keys, values = self._cache.keys, self._cache.values
        attention = PrefillAttention(
            self._attention, batch, keys, values, self._cache.page_size, self._cache.scales
        )
        return self._text.prefill(
            x, there["positions"], there["slots"], attention, keys, values, rows=there["last"]
        )

    def warm_up(self) -> None:
        """Runs passes of the kinds that are compiled apart. What they write lies in the spare page."""
        size, dim = self._cache.page_size, self._config.text.dim
        for count in WARM_UP_POSITIONS:
            x = torch.randn(count, dim, dtype=self._model.dtype, device=self._model.device)
            places = torch.arange(count, device=x.device) % size
            slots = places + self._spare_slot
            self._text.prefill(
                x, places, slots, _no_attention, self._cache.keys, self._cache.values
            )

    def capture(self, progress: Progress | None) -> None:
        if self._graphs is not None:
            self._graphs.capture(progress)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _arrays(self, batch: PrefillBatch, *names: str) -> dict[str, Tensor]:
        """Arrays of the batch on the device; values where there are any."""
        arrays = {name: getattr(batch, name) for name in names}
        if "ids" in arrays:
            arrays["ids"] = batch.ids[len(batch.blocks) * batch.block_length :]
        for name in ("coord_places", "coord_values", "size_places", "size_values"):
            if len(getattr(batch, name)):
                arrays[name] = getattr(batch, name)
        return self._upload({name: np.asarray(array) for name, array in arrays.items()})

    def _fill(self, batch: PrefillBatch, x: Tensor, there: dict[str, Tensor]) -> None:
        """The batch's embeddings into ``x`` [num_tokens, dim]."""
        length, region = batch.block_length, self._model.region
        for index, key in enumerate(batch.blocks):
            x[index * length : (index + 1) * length] = self._images.prefix(key)
        text = len(batch.blocks) * length
        if text < len(x):
            torch.index_select(self._model.text.wte, 0, there["ids"], out=x[text:])
        if "coord_places" in there:
            x[there["coord_places"]] = region.embed_coords(there["coord_values"])
        if "size_places" in there:
            x[there["size_places"]] = region.embed_sizes(there["size_values"])


def _has_text(row: Row) -> bool:
    """Whether there is more than an image prefix."""
    blocks, _ = row_size(row)
    return len(row.tokens) > 2 * blocks


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    out.zero_()
