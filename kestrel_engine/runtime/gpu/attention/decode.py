"""Attention of a decode step, with one interface for our own kernel and for FlashInfer.

An implementation does all work between the qkv GEMM and the output projection: it applies tau factors and RoPE, stores
the new keys and values in the KV cache, and attends to positions 0..p. Our kernel reads the page tables on the device.
FlashInfer computes the attention only, so `rope_store` runs before it, and the host plans FlashInfer's work before each
step (`FlashInferRows.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.paged_decode import DecodeWorkspace, choose_splits, paged_decode
from ....kernels.attention.paged_text import paged_text
from ....kernels.attention.rope_store import rope_store
from ....kernels.attention.shared_prefix import SharedPrefixes
from ....kernels.e4m3 import has_units
from ....models.kv_format import EIGHT_BITS, UNSCALED, Scales
from ....types.model_config import TextConfig
from ....types.step import Row, RuntimeLimits
from ..state.staging import Field, RowBuffers
from .flashinfer_paged import FlashInfer, FlashInferDecode

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


class FlashInferRows:
    """FlashInfer's attention, for steps of as many rows as the last plan.

    There is a wrapper for each number of rows, created at its first use, because a captured graph needs fixed buffers.
    ``max_pages``: the most pages of one row. Rows of padding read and write the first position of ``spare_page``.
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        config: TextConfig,
        limits: RuntimeLimits,
        max_pages: int,
        *,
        spare_page: int,
    ) -> None:
        self._flashinfer, self._config = flashinfer, config
        self._max_pages, self._page_size = max_pages, limits.page_size
        self._spare_page = spare_page
        fields = {"positions": Field(np.int64), "slots": Field(np.int64)}
        self._places = RowBuffers(fields, limits.max_batch_size, flashinfer.device)
        self._by_rows: dict[int, FlashInferDecode] = {}

    def plan(self, padded: int, rows: Sequence[Row]) -> None:
        """Plans a step of ``padded`` rows: ``rows``, then padding. Call it before each step, on the step's stream."""
        count, size = len(rows), self._page_size
        assert count <= padded, f"{count} rows in a step of {padded}"
        positions = [row.start for row in rows]
        host = self._places.host()
        host["positions"][:count] = positions
        host["positions"][count:] = 0
        host["slots"][:count] = [
            row.page_table[p // size] * size + p % size
            for row, p in zip(rows, positions, strict=True)
        ]
        host["slots"][count:] = self._spare_page * size
        self._places.send()
        spare = padded - count
        tables = [*(row.page_table for row in rows), *[(self._spare_page,)] * spare]
        self._decoder(padded).plan(tables, [*(p + 1 for p in positions), *[1] * spare])

    def __call__(self, inputs: AttentionInputs) -> None:
        """As `DecodeAttention`, but with the positions and pages of the plan instead of ``rows``."""
        assert inputs.shared is None, "the host plans for each row"
        assert inputs.scales == UNSCALED, "FlashInfer reads the model's dtype only"
        qkv, count = inputs.qkv, len(inputs.qkv)
        on_device = self._places.device
        positions, slots = on_device["positions"][:count], on_device["slots"][:count]
        rope_store(qkv, positions, slots, *inputs.pool, *inputs.angles, tau=inputs.tau)
        heads = self._config.n_heads, self._config.head_dim
        q = qkv[:, : self._config.dim].unflatten(1, heads)
        self._by_rows[count](q, *inputs.pool, inputs.out)

    def _decoder(self, rows: int) -> FlashInferDecode:
        found = self._by_rows.get(rows)
        if found is None:
            found = self._by_rows[rows] = FlashInferDecode(
                self._flashinfer,
                rows=rows,
                max_pages=rows * self._max_pages,
                num_heads=self._config.n_heads,
                head_dim=self._config.head_dim,
                page_size=self._page_size,
            )
        return found


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
