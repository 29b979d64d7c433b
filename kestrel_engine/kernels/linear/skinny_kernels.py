"""The kernels of `skinny_linear`, which launches them.

``dot_kernel`` gives each program BLOCK_N rows of the weight and one part of K. It multiplies on tensor cores with
swapped operands, weight [BLOCK_N, K] times x^T [K, BLOCK_M], so that the weight fills the 64-row instruction and the
few rows of x are its narrow side. ``row_kernel`` is for a single row of x: it uses plain multiply-adds, with the weight
in registers.

Programmatic dependent launch (PDL): before a program waits for the kernel that produces x, it requests its first weight
tiles (into L2 or into registers), so that reading weights continues between kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..adapters.slabs import (
    add_expanded,
    fetch_columns,
    fetch_rows,
    load_a,
    load_b,
    load_shrunk,
    slabs_of,
    store_all_shrunk,
    store_shrunk,
)
from .gelu import gelu_tanh
from .int4 import offset_numbers, scaled_sums, scales_of_pair, two_groups


@triton.jit
def _prefetch_l2(address, BYTES: tl.constexpr):
    """Prefetches BYTES bytes (a multiple of 16) at each address of a block of int64 into L2, without waiting."""
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; // $0",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The number of rows and the prefetch depth do not change the code, so they are not specialised.
@triton.jit(do_not_specialize=["num_rows", "prefetch"])
def dot_kernel(
    x, weight, boxes, bias, scales, out, tau, content, anchor, slabs, of_first, in_first, first_shrunk,
    of_hidden, in_hidden, hidden_shrunk, parts, num_rows, n, k, k_per_split, x_stride, w_stride,
    out_stride, split_stride, gelu_from, prefetch, tau_columns, tau_k, hidden_from, first_b, hidden_b,
    a_at, parts_stride, scale_stride,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, HAS_GELU: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TILE_BYTES: tl.constexpr, BOXES: tl.constexpr, TAU_PAD: tl.constexpr, FIRST: tl.constexpr,
    HIDDEN: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * k_per_split
    end = tl.minimum(begin + k_per_split, k)
    rows_n = tl.arange(0, BLOCK_N)
    rows_m = tl.arange(0, BLOCK_M)
    within_k = tl.arange(0, BLOCK_K)
    # Only the start of the tile needs 64 bits.
    w_tile = weight + first.to(tl.int64) * w_stride
    w_at = w_tile + rows_n[:, None] * w_stride + within_k[None, :]
    x_at = x + rows_m[:, None] * x_stride + within_k[None, :]
    keep_n = first + rows_n < n
    keep_m = rows_m < num_rows
    # Scales and bias are needed last but read now, so that the product hides the latency of the loads.
    if SCALED:
        scale = tl.load(scales + first + rows_n, mask=keep_n, other=0.0)
    if HAS_BIAS:
        added_bias = tl.load(bias + first + rows_n, mask=keep_n, other=0.0).to(tl.float32)
    if TAU_PAD:
        column = tl.arange(0, TAU_PAD)
        of_tau = (column < tau_columns)[:, None] & (first + rows_n < tau_k)[None, :]
        t = tl.load(
            tau + column[:, None] * tau_k + (first + rows_n)[None, :], mask=of_tau, other=0.0
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        line = (w_tile + rows_n * w_stride + begin).to(tl.int64)
        for tile in range(prefetch):
            _prefetch_l2(line + tile * TILE_BYTES, TILE_BYTES)
    if FIRST or HIDDEN:
        LINE: tl.constexpr = 1024 // anchor.dtype.element_ty.primitive_bitwidth
    if FIRST:
        first_slab, first_count, first_begin, first_end = slabs_of(
            of_first, in_first, rows_m, keep_m
        )
        if first >= hidden_from:
            first_end = first_begin
        if PDL:
            fetch_rows(anchor, slabs, first_begin, first_end, first_b, first, BLOCK_N, FIRST, LINE)
    if HIDDEN:
        hidden_slab, hidden_count, hidden_begin, hidden_end = slabs_of(
            of_hidden, in_hidden, rows_m, keep_m
        )
        # The first tile of the hidden layer may begin with other columns.
        hidden = first + rows_n - hidden_from
        keep_hidden = keep_n & (hidden >= 0)
        if first + BLOCK_N <= hidden_from:
            hidden_end = hidden_begin
        if HELD:
            # A and B of the first slabs are loaded into shared memory, beside the preceding kernel.
            held_b = load_b(
                anchor, slabs, hidden_begin, hidden_end, hidden_b, hidden, keep_hidden, HIDDEN
            )
            held_a = load_a(
                anchor, slabs, hidden_begin, hidden_end, a_at, n - hidden_from, hidden, keep_hidden, HIDDEN
            )  # fmt: skip
        elif PDL:
            if first >= hidden_from:
                row = first - hidden_from
                fetch_rows(
                    anchor, slabs, hidden_begin, hidden_end, hidden_b, row, BLOCK_N, HIDDEN, LINE
                )
                inputs = n - hidden_from
                fetch_columns(
                    anchor,
                    slabs,
                    hidden_begin,
                    hidden_end,
                    a_at,
                    inputs,
                    row,
                    BLOCK_N,
                    HIDDEN,
                    LINE,
                )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if HELD:
        held_shrunk = load_shrunk(
            hidden_shrunk, hidden_begin, hidden_end, hidden_slab, hidden_count, rows_m, HIDDEN
        )
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GROUP:
        # BLOCK_K bytes are two groups of 4-bit numbers. No tile has a part beyond the end.
        scale_rows = scales + (first + rows_n).to(tl.int64) * scale_stride
        DTYPE: tl.constexpr = x.dtype.element_ty
        # Its product with x has the sum of x in each of its rows, where the sums of the weights are.
        ones = tl.full([BLOCK_N, BLOCK_K], 1.0, DTYPE)
        for at in tl.range(begin, end, 2 * GROUP, num_stages=STAGES):
            w = tl.load(w_at + at // 2, mask=keep_n[:, None], other=0)
            high_x = tl.load(x_at + at, mask=keep_m[:, None], other=0.0)
            low_x = tl.load(x_at + at + GROUP, mask=keep_m[:, None], other=0.0)
            pair = at // (2 * GROUP)
            if DTYPE == tl.float32:
                high, low = two_groups(w, scale_rows, pair, keep_n, DTYPE)
                acc = tl.dot(high, tl.trans(high_x), acc, input_precision="ieee")
                acc = tl.dot(low, tl.trans(low_x), acc, input_precision="ieee")
            else:
                scale, zero, low_scale, low_zero = scales_of_pair(scale_rows, pair, keep_n)
                high, low = offset_numbers(w, DTYPE, PTX)
                acc += scaled_sums(high, ones, high_x, scale, zero)
                acc += scaled_sums(low, ones, low_x, low_scale, low_zero)
    else:
        for at in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            if BOXES:
                w = boxes.load([first, at])
            elif EVEN_N and EVEN_K:
                w = tl.load(w_at + at)
            elif EVEN_K:
                w = tl.load(w_at + at, mask=keep_n[:, None], other=0.0)
            else:
                keep = keep_n[:, None] & (at + within_k < end)[None, :]
                w = tl.load(w_at + at, mask=keep, other=0.0)
            if EVEN_K:
                rows = tl.load(x_at + at, mask=keep_m[:, None], other=0.0)
            else:
                keep = keep_m[:, None] & (at + within_k < end)[None, :]
                rows = tl.load(x_at + at, mask=keep, other=0.0)
            acc = tl.dot(w.to(x.dtype.element_ty), tl.trans(rows), acc, input_precision="ieee")
    if SCALED:
        acc *= scale[:, None]
    if HAS_BIAS:
        acc += added_bias[:, None]
    if FIRST:
        acc = add_expanded(
            acc, anchor, slabs, first_slab, first_count, first_begin, first_end, first_shrunk, first_b,
            rows_m, first + rows_n, keep_n & (first + rows_n < hidden_from), FIRST,
        )  # fmt: skip
    if HELD:
        s = tl.trans(held_shrunk.to(held_b.dtype))
        acc = tl.dot(held_b, s, acc, input_precision="ieee")
    if HIDDEN:
        beyond_held = hidden_begin + HELD * HIDDEN
        acc = add_expanded(
            acc, anchor, slabs, hidden_slab, hidden_count, beyond_held, hidden_end, hidden_shrunk,
            hidden_b, rows_m, hidden, keep_hidden, HIDDEN,
        )  # fmt: skip
    if HAS_GELU:
        acc = tl.where((first + rows_n >= gelu_from)[:, None], gelu_tanh(acc), acc)
    out += tl.program_id(1).to(tl.int64) * split_stride
    at_out = out + rows_m[:, None] * out_stride + (first + rows_n)[None, :]
    if SCALED and out.dtype.element_ty == tl.float16:
        acc = tl.clamp(acc, -65504.0, 65504.0)
    result = tl.trans(acc.to(out.dtype.element_ty))
    tl.store(at_out, result, mask=keep_m[:, None] & keep_n[None, :])
    if HIDDEN:
        # Each tile of the hidden layer has a part of its own.
        own_part = parts + (tl.program_id(0) - hidden_from // BLOCK_N).to(tl.int64) * parts_stride
        h = acc.to(out.dtype.element_ty)
        if HELD:
            shrunk = tl.dot(held_a, h.to(held_a.dtype), input_precision="ieee")
            store_shrunk(
                shrunk,
                own_part,
                hidden_begin,
                hidden_end,
                hidden_slab,
                hidden_count,
                rows_m,
                HIDDEN,
            )
        store_all_shrunk(
            h, anchor, slabs, hidden_slab, hidden_count, beyond_held, hidden_end, own_part, a_at,
            n - hidden_from, rows_m, hidden, keep_hidden, HIDDEN,
        )  # fmt: skip
    if TAU_PAD:
        if first < tau_k:
            # GELU reads the stored output, rounded to the weights' dtype, as a separate GELU kernel would.
            v = acc.to(out.dtype.element_ty).to(tl.float32)
            v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
            part = tl.dot(t, v.to(tau.dtype.element_ty), input_precision="ieee")
            at_row = (tl.program_id(0) * num_rows + rows_m) * tau_columns
            at_part = content + at_row[None, :] + column[:, None]
            tl.store(at_part, part, mask=keep_m[None, :] & (column < tau_columns)[:, None])


@triton.jit
def row_kernel(
    x, weight, bias, out, n, k, k_per_split, w_stride, split_stride, gelu_from,
    HAS_BIAS: tl.constexpr, HAS_GELU: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * k_per_split
    end = tl.minimum(begin + k_per_split, k)
    rows_n = tl.arange(0, BLOCK_N)
    within_k = tl.arange(0, BLOCK_K)
    keep_n = first + rows_n < n
    w_at = weight + first.to(tl.int64) * w_stride + rows_n[:, None] * w_stride + within_k[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Load the first tile into registers before waiting for x.
    if EVEN_N and EVEN_K:
        w = tl.load(w_at + begin)
    else:
        keep = keep_n[:, None] & (begin + within_k < end)[None, :]
        w = tl.load(w_at + begin, mask=keep, other=0.0)
    if HAS_BIAS:
        added_bias = tl.load(bias + first + rows_n, mask=keep_n, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + begin + within_k, mask=begin + within_k < end, other=0.0)
    acc = w.to(tl.float32) * v.to(tl.float32)[None, :]
    if not ONE_TILE:
        for at in range(begin + BLOCK_K, end, BLOCK_K):
            if EVEN_N and EVEN_K:
                w = tl.load(w_at + at)
            else:
                keep = keep_n[:, None] & (at + within_k < end)[None, :]
                w = tl.load(w_at + at, mask=keep, other=0.0)
            v = tl.load(x + at + within_k, mask=at + within_k < end, other=0.0)
            acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if HAS_BIAS:
        total += added_bias
    if HAS_GELU:
        total = tl.where(first + rows_n >= gelu_from, gelu_tanh(total), total)
    out += tl.program_id(1).to(tl.int64) * split_stride + first
    tl.store(out + rows_n, total.to(out.dtype.element_ty), mask=keep_n)
