"""Attention of one prefill pass: within each image block, and of text over the pages.

The flat batch starts with n blocks of BOS and image. The positions of a block attend to each other in both directions
and to nothing else. The text of all rows follows; it attends causally to all stored positions. Among it are images
later in a prompt, whose positions attend to all stored positions up to the last one of the image. Blocks read the
output of the qkv GEMM, and text reads the KV cache. `choose_attention` chooses the library once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import ConfigError
from ....models.kv_format import EIGHT_BITS, UNSCALED, Scales, gather
from .blocks import BlockAttention
from .flashinfer_paged import FlashInfer, FlashInferText, PlannedText

if TYPE_CHECKING:
    from ..prefill.batch import PrefillBatch, TextPart

MAX_GATHERED = 16384
"""The most positions whose keys and values the torch path copies at once."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The library of each kind of attention.

    ``text``: FlashInfer's, for passes that are not captured; None for torch. ``own_blocks``: of images, in captured
    passes too. ``captures``: passes that fit may run captured, with our own kernel for the text. ``decode``: FlashInfer
    for decode steps; None for our own kernel.
    """

    text: FlashInferText | None = None
    own_blocks: BlockAttention = field(default_factory=BlockAttention)
    captures: bool = True
    decode: FlashInfer | None = None

    @property
    def name(self) -> str:
        return "torch" if self.text is None else "flashinfer"


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, pool: torch.dtype | None = None
) -> AttentionChoice:
    """Chooses the library of each kind of attention.

    With a ``name`` of "auto" or "triton", our kernels compute decode and the text of captured passes, and torch the
    rest; nothing needs nvcc. With "flashinfer", FlashInfer computes all but images, which torch computes, and compiles
    its kernels at their first use. With "torch", torch computes prompts, and our kernel computes decode. ``pool``: the
    dtype of the KV cache, if it isn't ``dtype``. FlashInfer does not read an FP8 KV cache. Raises ConfigError for an
    unknown name, and if FlashInfer is named and not available.
    """
    if name not in ("auto", "flashinfer", "triton", "torch"):
        raise ConfigError("attention", name, "must be auto, flashinfer, triton or torch")
    if name == "flashinfer" and pool == EIGHT_BITS:
        raise ConfigError(
            "attention", name, "can't read a KV cache in FP8; use auto, triton or torch"
        )
    if name == "flashinfer":
        library = FlashInfer(device, dtype)
        # FlashInfer's fa2 is slower than torch.
        return AttentionChoice(FlashInferText(library), captures=False, decode=library)
    return AttentionChoice(
        own_blocks=BlockAttention.choose(device, dtype, own=name != "torch"),
        captures=name != "torch",
    )


class PrefillAttention:
    """Attention of one pass, called once for each layer. ``key_pool``, ``value_pool``: [layers, num_slots, H, D].
    ``scales``: the scales of each layer for an FP8 KV cache."""

    def __init__(
        self,
        choice: AttentionChoice,
        batch: PrefillBatch,
        key_pool: Tensor,
        value_pool: Tensor,
        page_size: int,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        self._keys, self._values, self._scales = key_pool, value_pool, scales
        self._num_blocks, self._length = len(batch.blocks), batch.block_length
        self._block_tokens = self._num_blocks * self._length
        self._own_blocks = choice.own_blocks
        self._text: PlannedText | None = None
        num_heads, head_dim = key_pool.shape[-2:]
        if batch.text:
            begin = self._block_tokens
            for part in batch.text:
                assert part.begin == begin, f"text at {part.begin} instead of {begin}"
                begin += part.count
            # FlashInfer's plan is for causal attention only.
            if choice.text is not None and all(part.image is None for part in batch.text):
                self._text = choice.text.plan(batch.text, num_heads, head_dim, page_size)
            else:
                self._text = GatheredText(batch.text, page_size, key_pool.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Writes the attention output to ``out`` [T, H*D] and returns it.

        ``q``, ``k``, ``v``: [T, H, D], rotated. The KV cache holds k and v already. All may have any row stride.
        """
        split = self._block_tokens
        if split:
            blocks = self._num_blocks, self._length
            self._own_blocks(blocks, q[:split], k[:split], v[:split], out[:split])
        if self._text is not None:
            scales = self._scales[layer] if self._scales is not None else UNSCALED
            self._text(q[split:], self._keys[layer], self._values[layer], out[split:], scales)
        return out


class GatheredText:
    """Attention of the text with torch. It gathers the keys and values of several rows, pads them to the longest, and
    computes the rows in one masked call. Rows of similar lengths form a group of at most `MAX_GATHERED` positions."""

    def __init__(self, parts: Sequence[TextPart], page_size: int, device: torch.device) -> None:
        first = parts[0].begin
        by_length = sorted(parts, key=lambda part: part.start + part.count)
        groups: list[list[TextPart]] = []
        for part in by_length:
            # The parts are sorted, so this one is the longest of its group so far.
            if groups and (len(groups[-1]) + 1) * (part.start + part.count) <= MAX_GATHERED:
                groups[-1].append(part)
            else:
                groups.append([part])
        self._groups = [_PaddedRows.of(group, first, page_size, device) for group in groups]

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scales: Scales = UNSCALED
    ) -> None:
        """As `PlannedText`."""
        for group in self._groups:
            group.attend(q, keys, values, out, scales)


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """A group of rows, padded to equal lengths.

    ``queries``: [n, longest] int64, indices of the text's tokens; a short row repeats its last token. ``slots``: [n,
    positions] int64; past the end of a row its first slot, which holds finite numbers. ``seen``: [n, 1, longest,
    positions] bool, the mask. ``places`` and ``sources``: int64, the indices of the results in the output and in
    [n * longest].
    """

    queries: Tensor
    slots: Tensor
    seen: Tensor
    places: Tensor
    sources: Tensor

    @classmethod
    def of(
        cls, parts: Sequence[TextPart], first: int, page_size: int, device: torch.device
    ) -> _PaddedRows:
        counts = np.array([part.count for part in parts])
        starts = np.array([part.start for part in parts])
        ends = starts + counts
        query = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        position = np.arange(ends.max())
        tables = np.zeros((len(parts), -(-int(ends.max()) // page_size)), dtype=np.int64)
        for row, part in enumerate(parts):
            used = -(-int(ends[row]) // page_size)
            tables[row, :used] = part.page_table[:used]
        at = np.where(position < ends[:, None], position, 0)
        slots = np.take_along_axis(tables, at // page_size, axis=1) * page_size + at % page_size
        begins = np.array([part.begin - first for part in parts])
        queries = begins[:, None] + query
        real = np.arange(counts.max()) < counts[:, None]
        is_image = np.array([part.image is not None for part in parts])
        reach = np.where(is_image[:, None], ends[:, None] - 1, starts[:, None] + query)
        seen = position <= reach[:, :, None]

        def upload(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            if device.type != "cuda":
                return tensor.to(device)
            return tensor.pin_memory().to(device, non_blocking=True)

        return cls(
            queries=upload(queries),
            slots=upload(slots),
            seen=upload(seen[:, None]),
            places=upload(queries[real]),
            sources=upload(np.flatnonzero(real)),
        )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scales: Scales) -> None:
        n, positions = self.slots.shape
        at = self.slots.flatten()
        k, v = (
            gather(pool, at, scale, q.dtype).unflatten(0, (n, positions)).transpose(1, 2)
            for pool, scale in zip((keys, values), scales, strict=True)
        )
        queries = q[self.queries].transpose(1, 2)
        attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=self.seen)
        rows = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        out.index_copy_(0, self.places, rows.index_select(0, self.sources))
