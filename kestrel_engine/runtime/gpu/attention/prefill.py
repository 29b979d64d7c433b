"""Attention of one prefill pass: image blocks among themselves, text over the pages.

The flat batch begins with n blocks of BOS and image, whose positions see each other both ways and nothing else; then
comes the text of all rows, which is causal over everything stored. Blocks read queries, keys and values where the qkv
GEMM left them; text reads the K/V pool. Which library computes is chosen once (`choose_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ....errors import ConfigError
from ....models.kv_format import EIGHT_BITS, UNSCALED, Scales, gather
from ..prefill.batch import TextPart
from .flashinfer_paged import DTYPES, FlashInfer, FlashInferBlocks, FlashInferText, PlannedBlocks
from .patches import works

MAX_GATHERED = 16384
"""Positions whose keys and values the torch path copies at a time."""


class Batch(Protocol):
    """What attention needs to know of a `PrefillBatch`."""

    @property
    def blocks(self) -> Sequence[object]: ...
    @property
    def block_length(self) -> int: ...
    @property
    def text(self) -> tuple[TextPart, ...]: ...


class PlannedText(Protocol):
    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scales: Scales = UNSCALED
    ) -> None:
        """``q`` [n, H, D], the text's queries; one layer's pools and their scales; writes ``out`` [n, H*D]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Of what no captured pass holds: ``text`` and ``blocks`` are FlashInfer's, if there; else torch computes them.
    Blocks of captured passes are always torch's, by ``block_backend`` (None leaves the choice to torch).

    ``captures``: passes that fit may run captured, where our own kernel attends to the text whatever stands here.
    ``decode``: FlashInfer computes decode steps, if there; else our own kernel does.
    """

    text: FlashInferText | None = None
    blocks: FlashInferBlocks | None = None
    block_backend: SDPBackend | None = None
    captures: bool = True
    decode: FlashInfer | None = None

    @property
    def name(self) -> str:
        return "torch" if self.text is None else "flashinfer"


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, pool: torch.dtype | None = None
) -> AttentionChoice:
    """``name``: "auto" and "triton" take our kernels for decode and the text of captured passes, else torch: nothing
    that needs nvcc. "flashinfer": it alone, which compiles its kernels for a minute or two when they are first used.
    "torch": it alone for prompts; decode, for which it has nothing, is ours. ``pool``: the type of keys and values, if
    it isn't ``dtype``: eight bits are read by our kernels and torch alone. Raises ConfigError where FlashInfer was
    asked for by name and can't be had."""
    if name not in ("auto", "flashinfer", "triton", "torch"):
        raise ConfigError("attention", name, "must be auto, flashinfer, triton or torch")
    if name == "flashinfer" and pool == EIGHT_BITS:
        raise ConfigError(
            "attention", name, "doesn't read a KV cache in FP8: auto, triton or torch"
        )
    if name == "flashinfer":
        library = FlashInfer(device, dtype)
        # fa2 is slower than torch.
        blocks = FlashInferBlocks(library) if library.backend == "fa3" else None
        return AttentionChoice(FlashInferText(library), blocks, captures=False, decode=library)
    return AttentionChoice(block_backend=_block_backend(device, dtype), captures=name != "torch")


def _block_backend(device: torch.device, dtype: torch.dtype) -> SDPBackend | None:
    """cuDNN where it computes with ``dtype``. Microseconds a layer for 1 / 2 / 4 / 6 blocks of 730 positions, 32 heads
    of 64, on an H100, with the copy of torch's result: cuDNN 25 / 36 / 70 / 105, flash 30 / 55 / 91 / 144; FlashInfer's
    fa3, which nvcc compiles for 81 s, 19 / 34 / 65 / 95."""
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    probe = torch.zeros(1, 8, 3, 1, 64, dtype=dtype, device=device)
    return SDPBackend.CUDNN_ATTENTION if works(SDPBackend.CUDNN_ATTENTION, probe) else None


def attend_blocks(
    backend: SDPBackend | None,
    blocks: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
) -> None:
    """``blocks``: their number and length. ``q``, ``k``, ``v`` [number * length, H, D], any row stride; writes ``out``
    [number * length, H*D], any row stride."""
    # [n, H, length, D], views all: kernels take any strides but the last.
    q, k, v = (x.unflatten(0, blocks).transpose(1, 2) for x in (q, k, v))
    with (
        nullcontext()
        if backend is None
        else sdpa_kernel([backend, SDPBackend.MATH], set_priority=True)
    ):
        attended = F.scaled_dot_product_attention(q, k, v)
    out.unflatten(0, blocks).unflatten(2, (q.shape[1], -1)).copy_(attended.transpose(1, 2))


class PrefillAttention:
    """Made for one pass from plain data; called once a layer. ``key_pool`` and ``value_pool``
    [layers, num_slots, H, D]; ``scales``: each layer's, where they are float8_e4m3fn."""

    def __init__(
        self,
        choice: AttentionChoice,
        batch: Batch,
        key_pool: Tensor,
        value_pool: Tensor,
        page_size: int,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        self._keys, self._values, self._scales = key_pool, value_pool, scales
        self._num_blocks, self._length = len(batch.blocks), batch.block_length
        self._block_tokens = self._num_blocks * self._length
        self._backend = choice.block_backend
        self._text: PlannedText | None = None
        self._blocks: PlannedBlocks | None = None
        num_heads, head_dim = key_pool.shape[-2:]
        if choice.blocks is not None and self._num_blocks:
            self._blocks = choice.blocks.plan(self._num_blocks, self._length, num_heads, head_dim)
        if batch.text:
            begin = self._block_tokens
            for part in batch.text:
                assert part.begin == begin, f"text at {part.begin} instead of {begin}"
                begin += part.count
            if choice.text is not None:
                self._text = choice.text.plan(batch.text, num_heads, head_dim, page_size)
            else:
                self._text = GatheredText(batch.text, page_size, key_pool.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """``q``, ``k``, ``v`` [T, H, D], rotated, any row stride; k and v are in the pools already. Writes and returns
        ``out`` [T, H*D], any row stride."""
        split = self._block_tokens
        if split and self._blocks is not None:
            self._blocks(q[:split], k[:split], v[:split], out[:split])
        elif split:
            blocks = self._num_blocks, self._length
            attend_blocks(self._backend, blocks, q[:split], k[:split], v[:split], out[:split])
        if self._text is not None:
            scales = self._scales[layer] if self._scales is not None else UNSCALED
            self._text(q[split:], self._keys[layer], self._values[layer], out[split:], scales)
        return out


class GatheredText:
    """Torch's answer: keys and values of several rows gathered and padded to the longest, one masked call for them.

    Rows of like lengths come together, as many as `MAX_GATHERED` positions hold.
    """

    def __init__(self, parts: Sequence[TextPart], page_size: int, device: torch.device) -> None:
        first = parts[0].begin
        by_length = sorted(parts, key=lambda part: part.start + part.count)
        groups: list[list[TextPart]] = []
        for part in by_length:
            # Sorted: this one is the longest of its group so far.
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
    """``queries`` [n, longest] int64: places among the text's tokens; a short row repeats its last. ``slots``
    [n, positions] int64; past a row's end its first, which holds finite numbers as others may not. ``seen``
    [n, 1, longest, positions] bool. ``places`` and ``sources`` int64: where real results go, and where in
    [n * longest] they are."""

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
        seen = position <= (starts[:, None] + query)[:, :, None]

        def upload(array: np.ndarray) -> Tensor:
            there = torch.from_numpy(np.ascontiguousarray(array))
            if device.type != "cuda":
                return there.to(device)
            return there.pin_memory().to(device, non_blocking=True)

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
