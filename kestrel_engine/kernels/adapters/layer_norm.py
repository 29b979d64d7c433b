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

from ..layer_norm import EPS, normalised, part_arguments, with_parts
from .slabs import MOST_SLABS, RANKS, RowSlabs, request

_RANKS = tl.constexpr(RANKS)
_FEW = tl.constexpr(4)
"""The ranks that are multiplied at once. Each further rank takes four registers of every thread."""
_MOST_REGISTERS = 112
"""Registers of a thread. With more, a program of 16 warps would not fit beside one of a GEMM, and could not begin
before that ends."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A change of the stream whose products with A are computed. ``parts``: [P, M, ranks] float32, their partial sums.
    ``b_at``: the offset of B [dim, 16] in the slabs of ``rows``."""

    rows: RowSlabs
    parts: Tensor
    b_at: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A change of the stream by a layer with the input ``x`` [M, dim], which may be the result of the LayerNorm before.
    ``a_at``, ``b_at``: the offsets of A [16, dim] and B [dim, 16] in the slabs of ``rows``."""

    rows: RowSlabs
    x: Tensor
    a_at: int
    b_at: int


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The products of the result with the A [16, dim] at ``a_at`` in the slabs of ``rows``. ``out``: [M, ranks]
    float32, to be written."""

    rows: RowSlabs
    out: Tensor
    a_at: int


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
def _changed(
    added, x, row, stride, anchor, slabs, first, count, a_at, b_at, dim, cols, mask,
):  # fmt: skip
    """Returns ``added`` with the change of a layer for its input, row ``row`` of ``x``."""
    if count > 0:
        given = tl.load(x + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        for i in range(count):
            slab = anchor + tl.load(slabs + first + i) * 16
            for part in tl.static_range(0, _RANKS, _FEW):
                rank = part + tl.arange(0, _FEW)
                s = _shrunk(_a(slab, a_at, dim, cols, rank, mask), given)
                added += _expanded(_b(slab, b_at, cols, rank, mask), s)
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
    x, part0, part1, part2, owed, weight, bias, out, anchor, slabs, of_summed, in_summed, summed,
    of_whole0, in_whole0, whole0, of_whole1, in_whole1, whole1, of_up0, in_up0, up0, of_up1, in_up1, up1,
    x_stride, out_stride, split_stride0, row_stride0, split_stride1, row_stride1, split_stride2,
    row_stride2, summed_stride, whole0_stride, whole1_stride, summed_b, whole0_a, whole0_b, whole1_a,
    whole1_b, up0_a, up1_a, dim, eps,
    SPLITS0: tl.constexpr, SPLITS1: tl.constexpr, SPLITS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUMMED: tl.constexpr, SUMMED_PAD: tl.constexpr, WHOLE0: tl.constexpr,
    WHOLE1: tl.constexpr, UP0: tl.constexpr, UP1: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr,
    LINE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
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
    if SUMMED > 0:
        summed_first, summed_count = tl.load(of_summed + row), tl.load(in_summed + row)
        if HELD:
            slab = anchor + tl.load(slabs + summed_first) * 16
            there = mask & (summed_count > 0)
            b0 = _b(slab, summed_b, cols, rank0, there)
            b1 = _b(slab, summed_b, cols, rank1, there)
            b2 = _b(slab, summed_b, cols, rank2, there)
            b3 = _b(slab, summed_b, cols, rank3, there)
        if PDL:
            _fetch(anchor, slabs, summed_first, summed_count, summed_b, dim, HELD, LINE, BLOCK)
    if WHOLE0:
        whole0_first, whole0_count = tl.load(of_whole0 + row), tl.load(in_whole0 + row)
        if PDL:
            _fetch(anchor, slabs, whole0_first, whole0_count, whole0_a, dim, 0, LINE, BLOCK)
            _fetch(anchor, slabs, whole0_first, whole0_count, whole0_b, dim, 0, LINE, BLOCK)
    if WHOLE1:
        whole1_first, whole1_count = tl.load(of_whole1 + row), tl.load(in_whole1 + row)
        if PDL:
            _fetch(anchor, slabs, whole1_first, whole1_count, whole1_a, dim, 0, LINE, BLOCK)
            _fetch(anchor, slabs, whole1_first, whole1_count, whole1_b, dim, 0, LINE, BLOCK)
    if UP0:
        up0_first, up0_count = tl.load(of_up0 + row), tl.load(in_up0 + row)
        if HELD:
            slab = anchor + tl.load(slabs + up0_first) * 16
            there = mask & (up0_count > 0)
            a0 = _a(slab, up0_a, dim, cols, rank0, there)
            a1 = _a(slab, up0_a, dim, cols, rank1, there)
            a2 = _a(slab, up0_a, dim, cols, rank2, there)
            a3 = _a(slab, up0_a, dim, cols, rank3, there)
        if PDL:
            _fetch(anchor, slabs, up0_first, up0_count, up0_a, dim, HELD, LINE, BLOCK)
    if UP1:
        up1_first, up1_count = tl.load(of_up1 + row), tl.load(in_up1 + row)
        if PDL:
            _fetch(anchor, slabs, up1_first, up1_count, up1_a, dim, 0, LINE, BLOCK)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added = tl.load(owed + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stream = x + row * x_stride + cols
    v = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    added = with_parts(
        added, part0, part1, part2, row, cols, mask, split_stride0, row_stride0, split_stride1,
        row_stride1, split_stride2, row_stride2, SPLITS0, SPLITS1, SPLITS2,
    )  # fmt: skip
    if SUMMED > 0:
        parts = summed + row * WIDTH
        if HELD:
            if summed_count > 0:
                s0 = _sum_of_parts(parts, summed_stride, rank0, SUMMED, SUMMED_PAD)
                s1 = _sum_of_parts(parts, summed_stride, rank1, SUMMED, SUMMED_PAD)
                s2 = _sum_of_parts(parts, summed_stride, rank2, SUMMED, SUMMED_PAD)
                s3 = _sum_of_parts(parts, summed_stride, rank3, SUMMED, SUMMED_PAD)
                added += _expanded(b0, s0) + _expanded(b1, s1)
                added += _expanded(b2, s2) + _expanded(b3, s3)
        for i in range(HELD, summed_count):
            slab = anchor + tl.load(slabs + summed_first + i) * 16
            for few in tl.static_range(0, _RANKS, _FEW):
                rank = few + tl.arange(0, _FEW)
                s = _sum_of_parts(parts + i * _RANKS, summed_stride, rank, SUMMED, SUMMED_PAD)
                added += _expanded(_b(slab, summed_b, cols, rank, mask), s)
    if WHOLE0:
        added = _changed(
            added, whole0, row, whole0_stride, anchor, slabs, whole0_first, whole0_count, whole0_a,
            whole0_b, dim, cols, mask,
        )  # fmt: skip
    if WHOLE1:
        added = _changed(
            added, whole1, row, whole1_stride, anchor, slabs, whole1_first, whole1_count, whole1_a,
            whole1_b, dim, cols, mask,
        )  # fmt: skip
    stored = (v + added).to(x.dtype.element_ty)
    tl.store(stream, stored, mask=mask)
    u = normalised(stored.to(tl.float32), mask, gain, shift, dim, eps)
    u = u.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + cols, u, mask=mask)
    wide = u.to(tl.float32)
    if UP0:
        to = up0 + row * WIDTH
        if HELD:
            if up0_count > 0:
                tl.store(to + rank0, _shrunk(a0, wide))
                tl.store(to + rank1, _shrunk(a1, wide))
                tl.store(to + rank2, _shrunk(a2, wide))
                tl.store(to + rank3, _shrunk(a3, wide))
        _store_shrunk(to, wide, anchor, slabs, up0_first, up0_count, up0_a, dim, cols, mask, HELD)
    if UP1:
        to = up1 + row * WIDTH
        _store_shrunk(to, wide, anchor, slabs, up1_first, up1_count, up1_a, dim, cols, mask, 0)


def adapted_layer_norm(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    weight: Tensor,
    ln_bias: Tensor,
    *,
    summed: Summed | None = None,
    whole: Sequence[Whole] = (),
    shrunk: Sequence[Shrunk] = (),
    pdl: bool = False,
    out: Tensor,
) -> Tensor:
    """As `kernels.layer_norm.add_layer_norm`, and adds ``summed`` and up to two ``whole`` changes to the stream, and
    writes up to two ``shrunk``. All have the same anchor and array of slabs.

    ``parts`` are [S, M, D] or [M, D]; there may be none.
    """
    num_rows, dim = x.shape
    tensors, strides, counts = part_arguments(parts, x)
    if not num_rows:
        return out
    block = triton.next_power_of_2(dim)
    pdl = pdl and x.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    if x.is_cuda:
        launch["maxnreg"] = _MOST_REGISTERS
    changes: list[Summed | Whole | Shrunk | None] = [
        summed,
        *whole,
        *[None] * (2 - len(whole)),
        *shrunk,
        *[None] * (2 - len(shrunk)),
    ]
    assert len(changes) == 5
    given = [change.rows for change in changes if change is not None]
    anchor, slabs = (given[0].anchor, given[0].slabs) if given else (x, x)
    assert not given or anchor.dtype == x.dtype
    for rows in given:
        assert rows.anchor is anchor and rows.slabs is slabs
        assert len(rows.first) == len(rows.count) == num_rows
    pointers, input_strides, offsets = list[Tensor](), list[int](), list[int]()
    for change in changes:
        pointers += [x, x] if change is None else [change.rows.first, change.rows.count]
        if isinstance(change, Summed):
            assert change.parts.shape[1] == num_rows and change.parts[0].is_contiguous()
        if isinstance(change, Shrunk):
            assert change.out.is_contiguous()
        pointers.append(x if change is None else _array(change))
    for each in (summed, *changes[1:3]):
        assert not isinstance(each, Shrunk)
        input_strides.append(0 if each is None else _array(each).stride(0))
    offsets.append(0 if summed is None else summed.b_at)
    for each in changes[1:3]:
        offsets += [each.a_at, each.b_at] if isinstance(each, Whole) else [0, 0]
    offsets += [each.a_at if isinstance(each, Shrunk) else 0 for each in changes[3:]]
    num_parts = 0 if summed is None else len(summed.parts)
    _adapted_layer_norm_kernel[(num_rows,)](
        x, *tensors, x if bias is None else bias, weight, ln_bias, out, anchor, slabs,
        *pointers, x.stride(0), out.stride(0), *strides, *input_strides, *offsets, dim, EPS,
        SPLITS0=counts[0], SPLITS1=counts[1], SPLITS2=counts[2], HAS_BIAS=bias is not None,
        SUMMED=num_parts, SUMMED_PAD=triton.next_power_of_2(max(1, num_parts)),
        WHOLE0=len(whole) > 0, WHOLE1=len(whole) > 1, UP0=len(shrunk) > 0, UP1=len(shrunk) > 1,
        HELD=int(not whole and len(shrunk) < 2), WIDTH=RANKS * MOST_SLABS,
        LINE=128 // x.element_size(), PDL=pdl, BLOCK=block, num_warps=min(max(block // 128, 1), 16), **launch,
    )  # fmt: skip
    return out


def _array(change: Summed | Whole | Shrunk) -> Tensor:
    if isinstance(change, Summed):
        return change.parts
    return change.x if isinstance(change, Whole) else change.out
