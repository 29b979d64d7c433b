"""Linear layers of few rows (M <= 128 in a decode step). The kernels are bound by reading the weight once.

There are two kernels. ``_dot_kernel`` gives each program BLOCK_N rows of the weight and one part of K. It multiplies on
tensor cores with swapped operands, weight [BLOCK_N, K] times x^T [K, BLOCK_M], so that the weight fills the 64-row
instruction and the few rows of x are its narrow side. ``_row_kernel`` is for a single row of x: it uses plain
multiply-adds, with the weight in registers.

Programmatic dependent launch (``pdl``): before a program waits for the kernel that produces x, it requests its first
weight tiles (into L2 or into registers), so that reading weights continues between kernels.

Numerics: sums are accumulated in float32. A row's result does not depend on the other rows. The number of splits
depends on N and K only, and ``_dot_kernel`` adds along K in the same order for every tile, so a row's result does not
depend on the number of rows either. There are two exceptions: ``_config`` may give a single row to ``_row_kernel``, and
it may give tiles of different depth to different numbers of rows, if K / splits is not a multiple of both depths.

A weight in FP8 has a scale for each of its rows. Its values are widened to the dtype of x, which represents them
exactly, and each sum is scaled at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..adapters.slabs import (
    MOST_SLABS,
    RANKS,
    RowSlabs,
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

MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of the weight.

    ``prefetch``: K tiles that a program prefetches into L2 before it waits (``pdl`` only). ``one_row``: use
    multiply-adds for one row of x. ``boxes``: load tiles with the tensor memory accelerator (sm_90) if the weight's
    alignment allows.
    """

    block_n: int
    block_k: int
    stages: int = 4
    warps: int = 4
    prefetch: int = 0
    one_row: bool = False
    boxes: bool = False


ADAPTERS_AT_ONCE = 8
"""The slabs of adapters that a tile multiplies at once. 16 rows with 8 adapters of rank 16 have so many."""
HELD_ROWS = 16
"""The most rows for which a tile loads these slabs before it waits, into 64 kB of shared memory. With more rows, and on
cards without ``pdl``, there is not as much. On a CPU, tests load them so, too."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """The change of some columns: B [columns, 16], at ``b_at`` in the slabs of ``rows``, times ``shrunk`` [M, ranks]
    float32, the products of the input with A."""

    rows: RowSlabs
    b_at: int
    shrunk: Tensor


@dataclass(frozen=True, slots=True)
class Adapted:
    """The changes of a GEMM by adapters: ``first`` of the columns below ``begin``, ``hidden`` of those from ``begin``
    on, before GELU. None if they are not changed.

    The columns from ``begin`` on may be the hidden layer of an MLP. ``parts`` [`adapter_parts`, M, ranks] float32 is
    for the products of the hidden layer with the next A [16, N - begin] at ``a_at``, as partial sums.
    """

    begin: int
    first: Expanded | None
    hidden: Expanded | None = None
    a_at: int = 0
    parts: Tensor | None = None


@triton.jit
def _prefetch_l2(address, BYTES: tl.constexpr):
    """Prefetches BYTES bytes (a multiple of 16) at each address of a block of int64 into L2, without waiting."""
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; // $0",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The number of rows and the prefetch depth do not change the code, so they are not specialised.
@triton.jit(do_not_specialize=["num_rows", "prefetch"])
def _dot_kernel(
    x, weight, boxes, bias, scales, out, tau, content, anchor, slabs, of_first, in_first, first_shrunk,
    of_hidden, in_hidden, hidden_shrunk, parts, num_rows, n, k, k_per_split, x_stride, w_stride,
    out_stride, split_stride, gelu_from, prefetch, tau_columns, tau_k, hidden_from, first_b, hidden_b,
    a_at, parts_stride,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, HAS_GELU: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TILE_BYTES: tl.constexpr, BOXES: tl.constexpr, TAU_PAD: tl.constexpr, FIRST: tl.constexpr,
    HIDDEN: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
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
        owed = tl.load(bias + first + rows_n, mask=keep_n, other=0.0).to(tl.float32)
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
        acc += owed[:, None]
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
def _row_kernel(
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
        owed = tl.load(bias + first + rows_n, mask=keep_n, other=0.0).to(tl.float32)
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
        total += owed
    if HAS_GELU:
        total = tl.where(first + rows_n >= gelu_from, gelu_tanh(total), total)
    out += tl.program_id(1).to(tl.int64) * split_stride + first
    tl.store(out + rows_n, total.to(out.dtype.element_ty), mask=keep_n)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scales: Tensor | None = None,
    gelu_from: int | None = None,
    tau: tuple[Tensor, Tensor] | None = None,
    adapted: Adapted | None = None,
    pdl: bool = False,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``x @ weight.T + bias`` [M, N] in x's dtype. Columns from ``gelu_from`` on get the tanh GELU, in float32.

    ``x``: [M, K], M <= 128. ``weight``: [N, K]. Both have the same dtype (bfloat16, float16 or float32) and any row
    stride. With ``scales`` [1, N] float32, the weight is float8_e4m3fn instead, divided by the scales of its rows, and
    x is not float32. ``bias``: [N] or None. ``pdl``: launch as a programmatic dependent (sm_90), which does not change
    results. ``tiling``: for benchmarks, a tiling to use instead of the one from the table.

    ``tau``: weights [C, K'], and a buffer [`content_parts`, M, C] float32 for partial sums of ``gelu(out[:, :K']) @
    weights.T`` with the exact GELU, rounded to the dtype of these weights (see `tau_content`). Each program multiplies
    its own columns.
    ``adapted``: the changes by adapters; None if no row has one.

    Raises ValueError for more than 128 rows.
    """
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    _launch(x, weight, bias, scales, gelu_from, out.unsqueeze(0), pdl, tiling, tau, adapted)
    return out


def content_parts(rows: int, weight: Tensor, tau_k: int) -> int:
    """Returns the number of partial sums over ``tau_k`` columns that `skinny_linear` writes."""
    n, k = weight.shape
    return -(-tau_k // _config(rows, n, k, 1, weight.element_size()).block_n)


def adapter_parts(rows: int, weight: Tensor, begin: int) -> int:
    """Returns the number of partial sums over the columns from ``begin`` on that `skinny_linear` writes."""
    n, k = weight.shape
    block_n = _config(rows, n, k, 1, weight.element_size()).block_n
    return -(-n // block_n) - begin // block_n


def skinny_partials(
    x: Tensor,
    weight: Tensor,
    *,
    splits: int | None = None,
    scales: Tensor | None = None,
    pdl: bool = False,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``x @ weight.T`` as partial sums [S, M, N] float32 over S parts of K, which `add_layer_norm` adds.

    ``splits``: S; None for `splits_of` the weight. ``out``: [S, M, N], whose S replaces ``splits``. The
    other arguments are those of `skinny_linear`.
    """
    if out is None:
        splits = splits_of(weight) if splits is None else splits
        shape = (splits, x.shape[0], weight.shape[0])
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, scales, None, out, pdl, tiling)
    return out


def splits_of(weight: Tensor) -> int:
    """Returns the parts of K for a weight [N, K]. In FP8 there are twice as many, because widening takes time, which
    two programs on a multiprocessor spend in turn."""
    (n, k), bytes_each = weight.shape, weight.element_size()
    splits = default_splits(n, k)
    return 2 * splits if bytes_each == 1 and k % (2 * splits * 256) == 0 else splits


def default_splits(n: int, k: int) -> int:
    """Returns the parts of K for about one tile of 64 rows on each of 132 multiprocessors.

    A part is a multiple of 256 if K allows.
    """
    tiles = (n + 63) // 64
    most = max(min(128 // tiles, k // 256), 1)
    return next((s for s in range(most, 0, -1) if k % (256 * s) == 0), most)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    gelu_from: int | None,
    out: Tensor,
    pdl: bool,
    tiling: Tiling | None,
    tau: tuple[Tensor, Tensor] | None = None,
    adapted: Adapted | None = None,
) -> None:
    """Launches the kernel that ``tiling`` selects. ``out``: [S, M, N]."""
    (rows, k), n, splits = x.shape, weight.shape[0], out.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; this kernel is for {MAX_ROWS} at most")
    if not rows:
        return
    t = tiling or _config(rows, n, k, splits, weight.element_size())
    assert (weight.dtype == x.dtype) if scales is None else scales.shape == (1, n), scales
    pdl = pdl and x.is_cuda
    k_per_split = triton.cdiv(triton.cdiv(k, splits), t.block_k) * t.block_k
    even_k = k % splits == 0 and k // splits == k_per_split
    grid = (triton.cdiv(n, t.block_n), splits)
    options: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_GELU": gelu_from is not None,
        "EVEN_N": n % t.block_n == 0,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
        "PDL": pdl,
        "num_warps": t.warps,
    }
    if pdl:
        options["launch_pdl"] = True
    gelu_from = n if gelu_from is None else gelu_from
    # Without a bias, the kernel still needs a pointer.
    given_bias = out if bias is None else bias
    if t.one_row:
        assert tau is None and adapted is None and scales is None, "not of one row by multiply-adds"
        _row_kernel[grid](
            x, weight, given_bias, out, n, k, k_per_split, weight.stride(0), out.stride(0),
            gelu_from, EVEN_K=even_k, ONE_TILE=k_per_split == t.block_k, **options,
        )  # fmt: skip
        return
    boxes = t.boxes and even_k and _is_aligned(weight)
    tau_weights, content = (out, out) if tau is None else tau
    columns, tau_k = (0, 0) if tau is None else tau_weights.shape
    if tau is not None:
        assert splits == 1 and tau_k <= n and tau_weights.is_contiguous()
        assert content.shape == (triton.cdiv(tau_k, t.block_n), rows, columns), content.shape
        assert content.is_contiguous()
    changes = adapted or _UNCHANGED
    on_device, places = _change_arguments(changes, x, out)
    parts = changes.parts
    if parts is not None:
        shape = triton.cdiv(n, t.block_n) - changes.begin // t.block_n, rows, RANKS * MOST_SLABS
        assert splits == 1 and parts.shape == shape and parts[0].is_contiguous(), parts.shape
    _dot_kernel[grid](
        x, weight, _boxes(weight, t) if boxes else weight, given_bias, out if scales is None else scales, out,
        tau_weights, content,
        *on_device, rows, n, k, k_per_split, x.stride(0), weight.stride(0), out.stride(1), out.stride(0),
        gelu_from, _prefetchable(weight, t, k_per_split) if pdl and even_k else 0, columns, tau_k,
        changes.begin, *places, changes.a_at, 0 if parts is None else parts.stride(0),
        EVEN_K=even_k,
        BLOCK_M=max(triton.next_power_of_2(rows), 16),
        STAGES=t.stages,
        SCALED=scales is not None,
        TILE_BYTES=t.block_k * weight.element_size(),
        BOXES=boxes,
        TAU_PAD=0 if tau is None else max(16, triton.next_power_of_2(columns)),
        FIRST=0 if changes.first is None else ADAPTERS_AT_ONCE,
        HIDDEN=0 if changes.hidden is None else ADAPTERS_AT_ONCE,
        HELD=int(changes.hidden is not None and rows <= HELD_ROWS and (pdl or not x.is_cuda)),
        **options,
    )  # fmt: skip


_UNCHANGED = Adapted(0, None)


def _change_arguments(
    changes: Adapted, x: Tensor, unused: Tensor
) -> tuple[list[Tensor], list[int]]:
    """Returns the kernel's pointers and the places in slabs. ``unused``: a pointer that the kernel does not read."""
    given = [each for each in (changes.first, changes.hidden) if each is not None]
    shared = [given[0].rows.anchor, given[0].rows.slabs] if given else [unused] * 2
    pointers, places = list[Tensor](), list[int]()
    for each in (changes.first, changes.hidden):
        if each is None:
            pointers += [unused] * 3
            places.append(0)
            continue
        own = each.rows
        assert own.anchor is shared[0] and own.slabs is shared[1] and own.anchor.dtype == x.dtype
        assert len(own.first) == len(own.count) == len(x) and each.shrunk.is_contiguous()
        pointers += [own.first, own.count, each.shrunk]
        places.append(each.b_at)
    return [*shared, *pointers, unused if changes.parts is None else changes.parts], places


def _is_aligned(weight: Tensor) -> bool:
    """Returns whether every row is aligned to 16 bytes, which bulk loads require."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0


def _boxes(weight: Tensor, t: Tiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [t.block_n, t.block_k])


def _prefetchable(weight: Tensor, t: Tiling, k_per_split: int) -> int:
    """Returns the tiles to prefetch; 0 if a row is not aligned, or if the last program's rows exceed the weight."""
    whole = weight.shape[0] % t.block_n == 0
    return min(t.prefetch, k_per_split // t.block_k) if whole and _is_aligned(weight) else 0


def _config(rows: int, n: int, k: int, splits: int, element_bytes: int) -> Tiling:
    """Returns the tiling for a shape, measured on an H200 in a chain of 24 layers (``benchmarks.kernels.linear``).

    A layer of Moondream 2 without attention takes 30.7, 31.2 and 35.3 us with 1, 16 and 64 rows; cuBLAS takes 37.6,
    38.6 and 40.5 us; the memory floor is 23.5 us. Prefetching into L2 before the wait costs more than it gains, except
    for the output GEMM of one or two rows, in front of which attention leaves the memory idle: with it, a layer with
    attention takes 47.2 us instead of 48.1 on an H100 (``benchmarks.kernels.decode_layers``). For one shape, all
    numbers of rows use tiles of the same depth, so a row has the same bits in every batch.
    """
    if element_bytes == 4:
        # Float32 does not use tensor cores, and its tiling is not tuned.
        return Tiling(32, 32, stages=3)
    if element_bytes == 1:
        # Twice as many programs as for two bytes: while one widens a tile, the other one waits for memory.
        deep = 256 if rows <= 32 and k // splits % 256 == 0 else 128
        return Tiling(64, deep, stages=3 if deep == 256 else 4, boxes=True)
    if n > 32768:
        return Tiling(64, 128, stages=4, boxes=True)
    if n > 8192:
        # Four tiles of x with 128 rows would exceed the shared memory.
        return Tiling(128, 128, stages=4 if rows <= 64 else 3, warps=8, boxes=True)
    if rows > 32:
        return Tiling(64, 128, stages=4, boxes=True)
    return Tiling(64, 128, stages=6, prefetch=4 if rows <= 2 and splits > 1 else 0)
