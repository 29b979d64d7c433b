"""The LayerNorm of a decode step, with the halves of adapters' changes on both of its sides.

The program of a row adds the change of the MLP before it, B times the sum of the parts of A times the hidden layer, and
multiplies its result by the A of the MLP after it. So a change of an MLP needs no launch of its own: the GEMM between
them does the other halves (`skinny_linear.Adapted`). Rows without an adapter are computed as by
`kernels.layer_norm.add_layer_norm`. They read nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import EPS, MAX_PARTS, _normalised, _sum_of
from .slabs import RANKS, RowSlabs, request

_RANKS = tl.constexpr(RANKS)


@dataclass(frozen=True, slots=True)
class Down:
    """The change of an MLP's output. ``parts``: [P, M, ranks] float32, partial sums of A times the hidden layer.
    ``b_at``: the offset of B [dim, 16] in a slab."""

    parts: Tensor
    b_at: int


@dataclass(frozen=True, slots=True)
class Up:
    """The first half of the change of an MLP's hidden layer. ``shrunk``: [M, ranks] float32, to be written. ``a_at``:
    the offset of A [16, dim] in a slab."""

    shrunk: Tensor
    a_at: int


@triton.jit
def _adapted_layer_norm_kernel(
    x, part0, part1, part2, owed, weight, bias, out, anchor, slabs, slab_first, slab_count, down, shrunk,
    x_stride, out_stride, split_stride0, row_stride0, split_stride1, row_stride1, split_stride2,
    row_stride2, down_stride, b_at, a_at, dim, eps,
    SPLITS0: tl.constexpr, SPLITS1: tl.constexpr, SPLITS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    DOWN: tl.constexpr, DOWN_PAD: tl.constexpr, UP: tl.constexpr, WIDTH: tl.constexpr,
    LINE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    rank = tl.arange(0, _RANKS)
    # No kernel writes these, so they are read before the wait.
    first = tl.load(slab_first + row)
    count = tl.load(slab_count + row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        line = tl.arange(0, BLOCK * _RANKS // LINE) * LINE
        last = dim * _RANKS - 1
        for i in range(count):
            slab = anchor + tl.load(slabs + first + i) * 16
            if DOWN > 0:
                request(slab + (b_at + tl.minimum(line, last)))
            if UP:
                request(slab + (a_at + tl.minimum(line, last)))
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added = tl.load(owed + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stream = x + row * x_stride + cols
    v = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    if SPLITS0 > 0:
        added += _sum_of(part0, row, cols, mask, split_stride0, row_stride0, SPLITS0)
    if SPLITS1 > 0:
        added += _sum_of(part1, row, cols, mask, split_stride1, row_stride1, SPLITS1)
    if SPLITS2 > 0:
        added += _sum_of(part2, row, cols, mask, split_stride2, row_stride2, SPLITS2)
    if DOWN > 0:
        part = tl.arange(0, DOWN_PAD)
        for i in range(count):
            slab = anchor + tl.load(slabs + first + i) * 16
            at = down + part[:, None] * down_stride + row * WIDTH + i * _RANKS + rank[None, :]
            s = tl.sum(tl.load(at, mask=(part < DOWN)[:, None], other=0.0), 0)
            b = tl.load(
                slab + (b_at + cols[:, None] * _RANKS + rank[None, :]),
                mask=mask[:, None],
                other=0.0,
            )
            s = s.to(b.dtype).to(tl.float32)
            added += tl.sum(b.to(tl.float32) * s[None, :], 1)
    stored = (v + added).to(x.dtype.element_ty)
    tl.store(stream, stored, mask=mask)
    u = _normalised(stored.to(tl.float32), mask, gain, shift, dim, eps)
    u = u.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + cols, u, mask=mask)
    if UP:
        wide = u.to(tl.float32)
        for i in range(count):
            slab = anchor + tl.load(slabs + first + i) * 16
            a = tl.load(
                slab + (a_at + rank[:, None] * dim + cols[None, :]), mask=mask[None, :], other=0.0
            )
            s = tl.sum(a.to(tl.float32) * wide[None, :], 1)
            tl.store(shrunk + row * WIDTH + i * _RANKS + rank, s)


def adapted_layer_norm(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    weight: Tensor,
    ln_bias: Tensor,
    rows: RowSlabs,
    *,
    down: Down | None,
    up: Up | None,
    pdl: bool = False,
    out: Tensor,
) -> Tensor:
    """As `kernels.layer_norm.add_layer_norm`, and adds ``down`` to the stream, and writes ``up.shrunk``.

    ``parts`` are [S, M, D] or [M, D]; there may be none. ``rows``: the slabs of the M rows.
    """
    num_rows, dim = x.shape
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts; at most {MAX_PARTS} can be added at once")
    if not num_rows:
        return out
    split = [p if p.dim() == 3 else p.unsqueeze(0) for p in parts]
    absent = MAX_PARTS - len(split)
    strides = [s for p in split for s in (p.stride(0), p.stride(1))] + [0, 0] * absent
    counts = [p.shape[0] for p in split] + [0] * absent
    block = triton.next_power_of_2(dim)
    pdl = pdl and x.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    sums = x if down is None else down.parts
    shrunk = x if up is None else up.shrunk
    num_parts = 0 if down is None else len(sums)
    width = shrunk.shape[-1] if down is None else sums.shape[-1]
    assert down is None or (sums.shape[1] == num_rows and sums[0].is_contiguous())
    assert up is None or (shrunk.is_contiguous() and shrunk.shape[-1] == width)
    assert len(rows.first) == len(rows.count) == num_rows and rows.anchor.dtype == x.dtype
    _adapted_layer_norm_kernel[(num_rows,)](
        x, *split, *[x] * absent, x if bias is None else bias, weight, ln_bias, out, rows.anchor,
        rows.slabs, rows.first, rows.count, sums, shrunk, x.stride(0), out.stride(0), *strides,
        0 if down is None else sums.stride(0), 0 if down is None else down.b_at,
        0 if up is None else up.a_at, dim, EPS, SPLITS0=counts[0], SPLITS1=counts[1],
        SPLITS2=counts[2], HAS_BIAS=bias is not None, DOWN=num_parts,
        DOWN_PAD=triton.next_power_of_2(max(1, num_parts)), UP=up is not None, WIDTH=width,
        LINE=128 // x.element_size(), PDL=pdl, BLOCK=block,
        num_warps=min(max(block // 128, 1), 16), **launch,
    )  # fmt: skip
    return out
