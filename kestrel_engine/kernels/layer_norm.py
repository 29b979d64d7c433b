"""LayerNorm of rows, fused with the sums before it: a pending bias, or the split-K partial sums of a decode step.

A row has at most 4096 elements. The statistics are computed in float32, with the variance of the centred row. Every sum
has a fixed order, so a row's result depends neither on the batch nor on the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
MAX_PARTS = 3


@triton.jit
def normalised(v, mask, gain, shift, dim, eps):
    """Returns the LayerNorm of one row ``v`` [BLOCK] float32, which is zero where ``mask`` is false."""
    mean = tl.sum(v, axis=0) / dim
    centred = tl.where(mask, v - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / dim
    return centred * tl.rsqrt(variance + eps) * gain + shift


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, pending, out, x_stride, out_stride, rows, dim, eps,
    HAS_PENDING: tl.constexpr, ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    # A row is split into its largest power of two and the rest, because masked lanes cost as much as others.
    at, to = x + row[:, None] * x_stride, out + row[:, None] * out_stride
    cols = tl.arange(0, MAIN)
    v = tl.load(at + cols[None, :], mask=there, other=0.0).to(tl.float32)
    if HAS_PENDING:
        v += tl.load(pending + cols)[None, :]
    total = tl.sum(v, 1)
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        inside = (more < dim)[None, :]
        w = tl.load(at + more[None, :], mask=there & inside, other=0.0).to(tl.float32)
        if HAS_PENDING:
            w += tl.load(pending + more, mask=more < dim, other=0.0)[None, :]
        total += tl.sum(w, 1)
    mean = (total / dim)[:, None]
    v -= mean
    squares = tl.sum(v * v, 1)
    if REST > 0:
        w = tl.where(inside, w - mean, 0.0)
        squares += tl.sum(w * w, 1)
    scale = tl.rsqrt(squares / dim + eps)[:, None]
    gain = tl.load(weight + cols).to(tl.float32)[None, :]
    shift = tl.load(bias + cols).to(tl.float32)[None, :]
    u = v * scale * gain + shift
    tl.store(to + cols[None, :], u.to(out.dtype.element_ty), mask=there)
    if REST > 0:
        gain = tl.load(weight + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(bias + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        u = w * scale * gain + shift
        tl.store(to + more[None, :], u.to(out.dtype.element_ty), mask=there & inside)


@triton.jit
def _sum_of(part, row, cols, mask, split_stride, row_stride, SPLITS: tl.constexpr):
    """Returns the sum of ``part[:, row]`` over the splits, in order: [BLOCK] float32."""
    at = part + row * row_stride + cols
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * split_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def with_parts(
    added, part0, part1, part2, row, cols, mask, split_stride0, row_stride0, split_stride1, row_stride1,
    split_stride2, row_stride2, SPLITS0: tl.constexpr, SPLITS1: tl.constexpr, SPLITS2: tl.constexpr,
):  # fmt: skip
    """Returns ``added`` [BLOCK] float32 plus row ``row`` of the parts, in order. A part without splits is not there."""
    if SPLITS0 > 0:
        added += _sum_of(part0, row, cols, mask, split_stride0, row_stride0, SPLITS0)
    if SPLITS1 > 0:
        added += _sum_of(part1, row, cols, mask, split_stride1, row_stride1, SPLITS1)
    if SPLITS2 > 0:
        added += _sum_of(part2, row, cols, mask, split_stride2, row_stride2, SPLITS2)
    return added


@triton.jit
def summed_stream(
    x, part0, part1, part2, added, row, cols, mask, x_stride, split_stride0, row_stride0,
    split_stride1, row_stride1, split_stride2, row_stride2,
    SPLITS0: tl.constexpr, SPLITS1: tl.constexpr, SPLITS2: tl.constexpr,
):  # fmt: skip
    """Returns row ``row`` of the stream ``x`` plus ``added`` [BLOCK] float32 and the parts, rounded to x's dtype."""
    v = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    added = with_parts(
        added, part0, part1, part2, row, cols, mask, split_stride0, row_stride0, split_stride1,
        row_stride1, split_stride2, row_stride2, SPLITS0, SPLITS1, SPLITS2,
    )  # fmt: skip
    return (v + added).to(x.dtype.element_ty)


@triton.jit
def _add_layer_norm_kernel(
    x, part0, part1, part2, owed, weight, bias, stream, out, x_stride, stream_stride, out_stride,
    split_stride0, row_stride0, split_stride1, row_stride1, split_stride2, row_stride2, dim, eps,
    SPLITS0: tl.constexpr, SPLITS1: tl.constexpr, SPLITS2: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Load the parameters before the wait, because no preceding kernel writes them.
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added = tl.load(owed + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stored = summed_stream(
        x, part0, part1, part2, added, row, cols, mask, x_stride, split_stride0, row_stride0,
        split_stride1, row_stride1, split_stride2, row_stride2, SPLITS0, SPLITS1, SPLITS2,
    )  # fmt: skip
    tl.store(stream + row * stream_stride + cols, stored, mask=mask)
    # The LayerNorm of the stored, rounded stream, so that the result depends on the residual stream only.
    u = normalised(stored.to(tl.float32), mask, gain, shift, dim, eps)
    tl.store(out + row * out_stride + cols, u.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, pending: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Returns ``LN(x + pending)`` [T, D], in ``out`` if that is given.

    ``x``: [T, D], with any row stride. ``weight``, ``bias``: [D]. ``pending``: [D] float32, biases that the residual
    stream does not contain yet. ``out``: [T, D]; it may be ``x``.
    """
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        main = 1 << (dim.bit_length() - 1)
        rest = triton.next_power_of_2(dim - main) if dim > main else 0
        # One warp for each row, so that no sum needs a barrier. Two rows a program, where registers suffice.
        together = 2 if dim <= 1536 else 1
        _layer_norm_kernel[(triton.cdiv(rows, together),)](
            x, weight, bias, x if pending is None else pending, out, x.stride(0), out.stride(0),
            rows, dim, EPS, HAS_PENDING=pending is not None, ROWS=together, MAIN=main, REST=rest,
            num_warps=1 if dim <= 2048 else 4,
        )  # fmt: skip
    return out


def add_layer_norm(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    weight: Tensor,
    ln_bias: Tensor,
    *,
    pdl: bool = False,
    stream: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Adds a decode step's residual: ``stream = x + bias + sum(parts)``, rounded to x's dtype. Returns ``LN(stream)``
    [M, D].

    ``x``: [M, D]. ``parts``: up to three tensors, each [S, M, D] or [M, D], in float32 or x's dtype, with a contiguous
    last dimension. ``bias``: [D] float32. ``weight``, ``ln_bias``: [D]. ``stream``: [M, D]; x itself if None. The parts
    are added in the given order, and the splits of a part from first to last. ``pdl``: launch as a programmatic
    dependent (sm_90), which reads the parameters while the preceding kernel still runs.

    Raises ValueError for more than three parts.
    """
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device) if out is None else out
    stream = x if stream is None else stream
    if not rows:
        return out
    tensors, strides, counts = part_arguments(parts, x)
    block = triton.next_power_of_2(dim)
    pdl = pdl and x.is_cuda
    # Only CUDA supports the launch attribute.
    launch = {"launch_pdl": True} if pdl else {}
    _add_layer_norm_kernel[(rows,)](
        x, *tensors, x if bias is None else bias, weight, ln_bias, stream, out,
        x.stride(0), stream.stride(0), out.stride(0), *strides, dim, EPS,
        SPLITS0=counts[0], SPLITS1=counts[1], SPLITS2=counts[2], HAS_BIAS=bias is not None,
        PDL=pdl, BLOCK=block, num_warps=row_warps(block), **launch,
    )  # fmt: skip
    return out


def part_arguments(
    parts: Sequence[Tensor], unused: Tensor
) -> tuple[list[Tensor], list[int], list[int]]:
    """Returns the tensors, strides and splits of up to three parts, each [S, M, D] or [M, D]. ``unused``: stands for
    parts that are not there. Raises ValueError for more than three."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts; at most {MAX_PARTS} can be added at once")
    split = [p if p.dim() == 3 else p.unsqueeze(0) for p in parts]
    absent = MAX_PARTS - len(split)
    strides = [s for p in split for s in (p.stride(0), p.stride(1))] + [0, 0] * absent
    return [*split, *[unused] * absent], strides, [p.shape[0] for p in split] + [0] * absent


def row_warps(block: int) -> int:
    """Returns the warps for eight elements a thread, a 16-byte access in half precision. A row's latency matters more
    than occupancy."""
    return min(max(block // 256, 1), 16)
