"""Attention of a decode step, and of few prompt tokens in its place, with one interface.

An implementation does all work between the qkv GEMM and the output projection: it applies tau factors and RoPE, stores
the new keys and values in the KV cache, and attends to positions 0..p. The kernels read the page tables on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ....kernels.attention.paged_decode import DecodeWorkspace, choose_splits, paged_decode
from ....kernels.attention.paged_text import paged_text
from ....kernels.attention.rope_store import rope_store
from ....kernels.attention.shared_prefix import SharedPrefixes
from ....kernels.e4m3 import has_units
from ....models.kv_format import EIGHT_BITS, UNSCALED, Scales
from ....types.model_config import TextConfig

EARLY_ROWS = 2
"""The most rows for which attention is launched before the preceding GEMM has ended."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention of one layer reads, for M rows of one token, and where it writes.

    ``qkv``: [M, >= 3*H*D], before RoPE and tau factors; it may be overwritten. ``pool``: keys and values, both
    [num_slots, H, D], in FP8 divided by ``scales``. ``rows``: positions and row_seq, both [M] int32, and page_table
    [num_seqs, max_pages] int32. ``angles``: cos and sin, both [max_positions, rotary_dim / 2] float32. ``tau``: raw
    content [M, 2*H] and alpha [H], both float32. ``out``: [M, H*D], which may be the columns of v. ``shared``: as for
    `paged_decode`.
    """

    qkv: Tensor
    pool: tuple[Tensor, Tensor]
    rows: tuple[Tensor, Tensor, Tensor]
    angles: tuple[Tensor, Tensor]
    tau: tuple[Tensor, Tensor] | None
    out: Tensor
    scales: Scales = UNSCALED
    shared: SharedPrefixes | None = None


DecodeAttention: TypeAlias = Callable[[AttentionInputs], object]
"""Computes the attention output of one layer."""


class PagedDecode:
    """Our kernel, in one launch. ``early``: the kernel may start before the preceding kernel has ended (sm_90)."""

    def __init__(
        self,
        config: TextConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        page_size: int,
        early: bool,
    ) -> None:
        self._config, self._page_size, self._early = config, page_size, early
        self._units = has_units(device)
        kinds = dtype, EIGHT_BITS
        shapes = [
            (rows, self._splits(rows, kind)) for rows in range(1, max_rows + 1) for kind in kinds
        ]
        self._workspace = DecodeWorkspace.allocate(shapes, config.n_heads, config.head_dim, device)

    def __call__(self, inputs: AttentionInputs) -> None:
        positions, row_seq, page_table = inputs.rows
        keys, values = inputs.pool
        rows = len(inputs.qkv)
        paged_decode(
            inputs.qkv,
            keys,
            values,
            page_table,
            row_seq,
            positions,
            *inputs.angles,
            page_size=self._page_size,
            tau=inputs.tau,
            scales=inputs.scales,
            splits=self._splits(rows, keys.dtype),
            workspace=self._workspace,
            out=inputs.out,
            # More rows fill the GPU without overlap, and waiting programs take resources from the GEMM: with 16 rows, a
            # layer took 84 us on an H200 with an early launch and takes 65 us without.
            pdl=self._early and rows <= EARLY_ROWS,
            shared=inputs.shared,
        )

    def _splits(self, rows: int, pool: torch.dtype) -> int:
        config = self._config
        return choose_splits(rows, config.n_heads, config.head_dim, pool, units=self._units)


class PagedPrompts:
    """Implements `DecodeAttention` for rows that may be tokens of one sequence.

    Such rows attend to each other, so all keys and values are stored before the first row attends. ``page_table``:
    [num_seqs, max_pages] int32.
    """

    def __init__(self, page_table: Tensor, page_size: int) -> None:
        self._page_table, self._page_size = page_table, page_size

    def __call__(self, inputs: AttentionInputs) -> None:
        """As `DecodeAttention`. ``rows``: positions and slots, both [M] int64, and the tiles of `paged_text`."""
        assert inputs.shared is None, "tiles of one sequence share their reads already"
        qkv, pool, scales = inputs.qkv, inputs.pool, inputs.scales
        positions, slots, tiles = inputs.rows
        rope_store(qkv, positions, slots, *pool, *inputs.angles, tau=inputs.tau, scales=scales)
        _, heads, head_dim = pool[0].shape
        q = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        paged_text(
            q,
            *pool,
            self._page_table,
            tiles,
            page_size=self._page_size,
            scales=scales,
            out=inputs.out,
        )
