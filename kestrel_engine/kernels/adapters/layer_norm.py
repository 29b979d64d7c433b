"""The LayerNorm of a decode step, with the halves of adapters' changes on both of its sides.

The program of a row adds the change of the MLP before it, B times the sum of the parts of A times the hidden layer, and
multiplies its result by the A of the MLP after it. The GEMM between them does the other halves
(`skinny_linear.GemmChanges`). Rows without an adapter are computed as by `kernels.layer_norm.add_layer_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import EPS, normalised, part_arguments, with_parts
from .slabs import MOST_SLABS, RANKS, RowSlabs, request

_RANKS = tl.constexpr(RANKS)
_FEW = tl.constexpr(4)
"""The ranks that are multiplied at once. Each further rank takes four registers of every thread."""
_MOST_REGISTERS = 112
"""Registers of a thread. With more, a program of 16 warps would not fit beside one of a GEMM, and could not begin
before that ends."""


@dataclass(frozen=True, slots=True)
class SummedChange:
    """A change of the stream whose products with A are computed. ``parts``: [P, M, ranks] float32, their partial sums.
    ``b_at``: the offset of B [dim, 16] in the slabs of ``rows``."""

    rows: RowSlabs
    parts: Tensor
    b_at: int


@dataclass(frozen=True, slots=True)
class WholeChange:
    """A change of the stream by a layer with the input ``x`` [M, dim], which may be the result of the LayerNorm before.
    ``a_at``, ``b_at``: the offsets of A [16, dim] and B [dim, 16] in the slabs of ``rows``."""

    rows: RowSlabs
    x: Tensor
    a_at: int
    b_at: int


@dataclass(frozen=True, slots=True)
class NextProducts:
    """The products of the result with the A [16, dim] at ``a_at`` of ``rows``. ``out``: [M, ranks] float32."""

    rows: RowSlabs
    out: Tensor
    a_at: int


class _Read(NamedTuple):
    """What the kernel reads of a change: the slabs of the rows, its tensor with the stride of the first dimension, and
    the offsets of A and B in a slab."""

    first: Tensor
    num_slabs: Tensor
    data: Tensor
    stride: int
    a_at: int
    b_at: int

    @classmethod
    def of(cls, change: SummedChange | WholeChange | NextProducts, num_rows: int) -> _Read:
        rows = change.rows
        assert len(rows.first) == len(rows.count) == num_rows
        if isinstance(change, SummedChange):
            assert change.parts.shape[1] == num_rows and change.parts[0].is_contiguous()
            return cls(rows.first, rows.count, change.parts, change.parts.stride(0), 0, change.b_at)
        if isinstance(change, NextProducts):
            assert change.out.is_contiguous()
            return cls(rows.first, rows.count, change.out, 0, change.a_at, 0)
        places = change.x.stride(0), change.a_at, change.b_at
        return cls(rows.first, rows.count, change.x, *places)


@triton.jit
def _fetch(
    anchor, slabs, first, count, at, dim, HELD: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Requests the matrix of 16 * dim elements at ``at`` in each of the row's slabs, but for the first HELD ones."""
    line = tl.arange(0, BLOCK * _RANKS // LINE) * LINE
    for i in range(HELD, count):
        slab = anchor + tl.load(slabs + first + i) * 16
        request(slab + (at + tl.minimum(line, dim * _RANKS - 1)))


@triton.jit
def _a(slab, a_at, dim, cols, rank, mask):
    """Returns the ranks ``rank`` of A [16, dim]."""
    at = slab + (a_at + rank[:, None] * dim + cols[None, :])
    return tl.load(at, mask=mask[None, :], other=0.0)


@triton.jit
def _b(slab, b_at, cols, rank, mask):
    """Returns the ranks ``rank`` of B [dim, 16]."""
    at = slab + (b_at + cols[:, None] * _RANKS + rank[None, :])
    return tl.load(at, mask=mask[:, None], other=0.0)


@triton.jit
def _shrunk(a, wide):
    """Returns the ranks of ``a`` times ``wide`` [BLOCK] float32."""
    return tl.sum(a.to(tl.float32) * wide[None, :], 1)


@triton.jit
def _expanded(b, s):
    """Returns the ranks of ``b`` times ``s`` float32, which is rounded first, as a result of A would be."""
    return tl.sum(b.to(tl.float32) * s.to(b.dtype).to(tl.float32)[None, :], 1)


@triton.jit
def _sum_of_parts(parts, stride, rank, SUMMED: tl.constexpr, PAD: tl.constexpr):
    """Returns the sum of SUMMED partial sums of the ranks ``rank``."""
    part = tl.arange(0, PAD)
    at = parts + part[:, None] * stride + rank[None, :]
    return tl.sum(tl.load(at, mask=(part < SUMMED)[:, None], other=0.0), 0)


@triton.jit
def _changed(added, whole, row, anchor, slabs, first, count, dim, cols, mask):
    """Returns ``added`` with the change of a layer for its input, row ``row`` of its data."""
    if count > 0:
        at = whole.data + row * whole.stride + cols
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        for i in range(count):
            slab = anchor + tl.load(slabs + first + i) * 16
            for part in tl.static_range(0, _RANKS, _FEW):
                rank = part + tl.arange(0, _FEW)
                s = _shrunk(_a(slab, whole.a_at, dim, cols, rank, mask), before)
                added += _expanded(_b(slab, whole.b_at, cols, rank, mask), s)
    return added


@triton.jit
def _store_shrunk(to, wide, anchor, slabs, first, count, a_at, dim, cols, mask, HELD: tl.constexpr):
    for i in range(HELD, count):
        slab = anchor + tl.load(slabs + first + i) * 16
        for part in tl.static_range(0, _RANKS, _FEW):
            rank = part + tl.arange(0, _FEW)
            s = _shrunk(_a(slab, a_at, dim, cols, rank, mask), wide)
            tl.store(to + i * _RANKS + rank, s)


@triton.jit
def _adapted_layer_norm_kernel(
    x, parts, output_bias, weight, bias, out, anchor, slabs, summed, whole0, whole1, up0, up1, x_stride,
    out_stride, dim, eps, SPLITS: tl.constexpr, SUMMED: tl.constexpr, SUMMED_PAD: tl.constexpr,
    HELD: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    rank0 = tl.arange(0, _FEW)
    rank1, rank2, rank3 = rank0 + _FEW, rank0 + 2 * _FEW, rank0 + 3 * _FEW
    # No kernel writes a row's slabs, so they are read, and requested, before the wait. With HELD, B of `summed` and A
    # of the first of `shrunk` wait in registers, those of the row's first slab.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if summed is not None:
        summed_first, summed_count = tl.load(summed.first + row), tl.load(summed.num_slabs + row)
        if HELD:
            slab = anchor + tl.load(slabs + summed_first) * 16
            there = mask & (summed_count > 0)
            b0 = _b(slab, summed.b_at, cols, rank0, there)
            b1 = _b(slab, summed.b_at, cols, rank1, there)
            b2 = _b(slab, summed.b_at, cols, rank2, there)
            b3 = _b(slab, summed.b_at, cols, rank3, there)
        if PDL:
            _fetch(anchor, slabs, summed_first, summed_count, summed.b_at, dim, HELD, LINE, BLOCK)
    if whole0 is not None:
        whole0_first, whole0_count = tl.load(whole0.first + row), tl.load(whole0.num_slabs + row)
        if PDL:
            _fetch(anchor, slabs, whole0_first, whole0_count, whole0.a_at, dim, 0, LINE, BLOCK)
            _fetch(anchor, slabs, whole0_first, whole0_count, whole0.b_at, dim, 0, LINE, BLOCK)
    if whole1 is not None:
        whole1_first, whole1_count = tl.load(whole1.first + row), tl.load(whole1.num_slabs + row)
        if PDL:
            _fetch(anchor, slabs, whole1_first, whole1_count, whole1.a_at, dim, 0, LINE, BLOCK)
            _fetch(anchor, slabs, whole1_first, whole1_count, whole1.b_at, dim, 0, LINE, BLOCK)
    if up0 is not None:
        up0_first, up0_count = tl.load(up0.first + row), tl.load(up0.num_slabs + row)
        if HELD:
            slab = anchor + tl.load(slabs + up0_first) * 16
            there = mask & (up0_count > 0)
            a0 = _a(slab, up0.a_at, dim, cols, rank0, there)
            a1 = _a(slab, up0.a_at, dim, cols, rank1, there)
            a2 = _a(slab, up0.a_at, dim, cols, rank2, there)
            a3 = _a(slab, up0.a_at, dim, cols, rank3, there)
        if PDL:
            _fetch(anchor, slabs, up0_first, up0_count, up0.a_at, dim, HELD, LINE, BLOCK)
    if up1 is not None:
        up1_first, up1_count = tl.load(up1.first + row), tl.load(up1.num_slabs + row)
        if PDL:
            _fetch(anchor, slabs, up1_first, up1_count, up1.a_at, dim, 0, LINE, BLOCK)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if output_bias is not None:
        added = tl.load(output_bias + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stream = x + row * x_stride + cols
    v = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    added = with_parts(added, parts, row, cols, mask, SPLITS)
    if summed is not None:
        sums = summed.data + row * WIDTH
        if HELD:
            if summed_count > 0:
                s0 = _sum_of_parts(sums, summed.stride, rank0, SUMMED, SUMMED_PAD)
                s1 = _sum_of_parts(sums, summed.stride, rank1, SUMMED, SUMMED_PAD)
                s2 = _sum_of_parts(sums, summed.stride, rank2, SUMMED, SUMMED_PAD)
                s3 = _sum_of_parts(sums, summed.stride, rank3, SUMMED, SUMMED_PAD)
                added += _expanded(b0, s0) + _expanded(b1, s1)
                added += _expanded(b2, s2) + _expanded(b3, s3)
        for i in range(HELD, summed_count):
            slab = anchor + tl.load(slabs + summed_first + i) * 16
            for few in tl.static_range(0, _RANKS, _FEW):
                rank = few + tl.arange(0, _FEW)
                s = _sum_of_parts(sums + i * _RANKS, summed.stride, rank, SUMMED, SUMMED_PAD)
                added += _expanded(_b(slab, summed.b_at, cols, rank, mask), s)
    if whole0 is not None:
        added = _changed(
            added, whole0, row, anchor, slabs, whole0_first, whole0_count, dim, cols, mask
        )
    if whole1 is not None:
        added = _changed(
            added, whole1, row, anchor, slabs, whole1_first, whole1_count, dim, cols, mask
        )
    stored = (v + added).to(x.dtype.element_ty)
    tl.store(stream, stored, mask=mask)
    u = normalised(stored.to(tl.float32), mask, gain, shift, dim, eps)
    u = u.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + cols, u, mask=mask)
    wide = u.to(tl.float32)
    if up0 is not None:
        to = up0.data + row * WIDTH
        if HELD:
            if up0_count > 0:
                tl.store(to + rank0, _shrunk(a0, wide))
                tl.store(to + rank1, _shrunk(a1, wide))
                tl.store(to + rank2, _shrunk(a2, wide))
                tl.store(to + rank3, _shrunk(a3, wide))
        _store_shrunk(
            to, wide, anchor, slabs, up0_first, up0_count, up0.a_at, dim, cols, mask, HELD
        )
    if up1 is not None:
        to = up1.data + row * WIDTH
        _store_shrunk(to, wide, anchor, slabs, up1_first, up1_count, up1.a_at, dim, cols, mask, 0)


def adapted_layer_norm(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    weight: Tensor,
    ln_bias: Tensor,
    *,
    summed: SummedChange | None = None,
    whole: Sequence[WholeChange] = (),
    shrunk: Sequence[NextProducts] = (),
    pdl: bool = False,
    out: Tensor,
) -> Tensor:
    """As `kernels.layer_norm.add_layer_norm`, and adds ``summed`` and up to two ``whole`` changes to the stream, and
    writes up to two ``shrunk``. All have the same anchor and array of slabs. ``parts`` may be empty.
    """
    num_rows, dim = x.shape
    if not num_rows:
        return out
    block = triton.next_power_of_2(dim)
    pdl = pdl and x.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    if x.is_cuda:
        launch["maxnreg"] = _MOST_REGISTERS
    changes = [each for each in (summed, *whole, *shrunk) if each is not None]
    anchor, slabs = (changes[0].rows.anchor, changes[0].rows.slabs) if changes else (x, x)
    assert not changes or anchor.dtype == x.dtype
    assert all(each.rows.anchor is anchor and each.rows.slabs is slabs for each in changes)
    reads = [each and _Read.of(each, num_rows) for each in (summed, *_two(whole), *_two(shrunk))]
    summands, splits = part_arguments(parts)
    num_parts = 0 if summed is None else len(summed.parts)
    _adapted_layer_norm_kernel[(num_rows,)](
        x, summands, bias, weight, ln_bias, out, anchor, slabs, *reads, x.stride(0), out.stride(0),
        dim, EPS, SPLITS=splits, SUMMED=num_parts, SUMMED_PAD=triton.next_power_of_2(max(1, num_parts)),
        HELD=int(not whole and len(shrunk) < 2), WIDTH=RANKS * MOST_SLABS,
        LINE=128 // x.element_size(), PDL=pdl, BLOCK=block, num_warps=min(max(block // 128, 1), 16), **launch,
    )  # fmt: skip
    return out


def _two(
    changes: Sequence[WholeChange] | Sequence[NextProducts],
) -> tuple[WholeChange | NextProducts | None, ...]:
    return (*changes, None, None)[:2]
