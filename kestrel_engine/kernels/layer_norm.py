"""LayerNorm of rows, fused with the sums before it: a pending bias, or the split-K partial sums of a decode step.

A row has at most 4096 elements. The statistics are float32, with the variance of the centred row. Every sum has a fixed
order, so a row's result depends neither on the batch nor on the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
LEAST_PEAK = 1e-12
"""The smallest peak of a row in FP8, so that a row of zeros has a valid scale."""


class Summand(NamedTuple):
    """A summand of the stream, as a kernel reads it: ``data`` [splits, M, D], whose splits are added in order."""

    data: Tensor
    split_stride: int
    row_stride: int


@triton.jit
def normalised(v, mask, gain, shift, dim, eps):
    """Returns the LayerNorm of one row ``v`` [BLOCK] float32, which is zero where ``mask`` is false."""
    mean = tl.sum(v, axis=0) / dim
    centred = tl.where(mask, v - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / dim
    return centred * tl.rsqrt(variance + eps) * gain + shift


@triton.jit
def _layer_norm_kernel(
    x, add, weight, bias, pending, out, norms, values, scales, x_stride, add_stride, out_stride,
    rows, dim, eps, fp8_max, least_peak,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The LayerNorm of ROWS rows, of ``x + add``, which it writes to ``x``, and of what ``pending`` adds. It writes the
    result to ``out``, its norms, and the result in FP8 with one scale a row. Each may be None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    # A row is split into its largest power of two and the rest, because masked lanes cost as much as others.
    at = x + row[:, None] * x_stride
    cols = tl.arange(0, MAIN)
    v = tl.load(at + cols[None, :], mask=there, other=0.0).to(tl.float32)
    if add is not None:
        more_at = add + row[:, None] * add_stride
        v += tl.load(more_at + cols[None, :], mask=there, other=0.0).to(tl.float32)
        # The LayerNorm of the stored, rounded stream, so that the result depends on the residual stream only.
        stored = v.to(x.dtype.element_ty)
        tl.store(at + cols[None, :], stored, mask=there)
        v = stored.to(tl.float32)
    if pending is not None:
        v += tl.load(pending + cols)[None, :]
    total = tl.sum(v, 1)
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        inside = (more < dim)[None, :]
        w = tl.load(at + more[None, :], mask=there & inside, other=0.0).to(tl.float32)
        if add is not None:
            w += tl.load(more_at + more[None, :], mask=there & inside, other=0.0).to(tl.float32)
            stored = w.to(x.dtype.element_ty)
            tl.store(at + more[None, :], stored, mask=there & inside)
            w = stored.to(tl.float32)
        if pending is not None:
            w += tl.load(pending + more, mask=more < dim, other=0.0)[None, :]
        total += tl.sum(w, 1)
    mean = (total / dim)[:, None]
    v -= mean
    squares = tl.sum(v * v, 1)
    if REST > 0:
        w = tl.where(inside, w - mean, 0.0)
        squares += tl.sum(w * w, 1)
    factor = tl.rsqrt(squares / dim + eps)[:, None]
    gain = tl.load(weight + cols).to(tl.float32)[None, :]
    shift = tl.load(bias + cols).to(tl.float32)[None, :]
    v = v * factor * gain + shift
    if REST > 0:
        gain = tl.load(weight + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(bias + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        w = w * factor * gain + shift
    if norms is not None:
        squares = tl.sum(v * v, 1)
        if REST > 0:
            squares += tl.sum(w * w, 1)
        tl.store(norms + row, tl.sqrt(squares), mask=row < rows)
    if out is not None:
        plain = out + row[:, None] * out_stride
        tl.store(plain + cols[None, :], v.to(out.dtype.element_ty), mask=there)
        if REST > 0:
            tl.store(plain + more[None, :], w.to(out.dtype.element_ty), mask=there & inside)
    if values is not None:
        peak = tl.max(tl.abs(v), 1)
        if REST > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(w), 1))
        peak = tl.maximum(peak, least_peak)
        tl.store(scales + row, peak / fp8_max, mask=row < rows)
        up, to = (fp8_max / peak)[:, None], values + row[:, None] * dim
        tl.store(to + cols[None, :], (v * up).to(values.dtype.element_ty), mask=there)
        if REST > 0:
            tl.store(to + more[None, :], (w * up).to(values.dtype.element_ty), mask=there & inside)


@triton.jit
def _sum_of(part, row, cols, mask, SPLITS: tl.constexpr):
    """Returns the sum of row ``row`` of a `Summand` over the splits, in order: [BLOCK] float32."""
    at = part.data + row * part.row_stride + cols
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * part.split_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def with_parts(added, parts, row, cols, mask, SPLITS: tl.constexpr):
    """Returns ``added`` [BLOCK] float32 plus row ``row`` of each `Summand`, in order. ``parts``: None for none."""
    if parts is not None:
        for i in tl.static_range(len(parts)):
            added += _sum_of(parts[i], row, cols, mask, SPLITS[i])
    return added


@triton.jit
def summed_stream(x, parts, added, row, cols, mask, x_stride, SPLITS: tl.constexpr):
    """Returns row ``row`` of the stream ``x`` plus ``added`` [BLOCK] float32 and the parts, rounded to x's dtype."""
    v = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    return (v + with_parts(added, parts, row, cols, mask, SPLITS)).to(x.dtype.element_ty)


@triton.jit
def _add_layer_norm_kernel(
    x, parts, output_bias, weight, bias, stream, out, x_stride, stream_stride, out_stride, dim, eps,
    SPLITS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
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
    if output_bias is not None:
        added = tl.load(output_bias + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stored = summed_stream(x, parts, added, row, cols, mask, x_stride, SPLITS)
    tl.store(stream + row * stream_stride + cols, stored, mask=mask)
    # The LayerNorm of the stored, rounded stream, so that the result depends on the residual stream only.
    u = normalised(stored.to(tl.float32), mask, gain, shift, dim, eps)
    tl.store(out + row * out_stride + cols, u.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, pending: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Returns ``LN(x + pending)`` [T, D], in ``out`` if given, which may be ``x``. ``x``: [T, D], with any row stride.
    ``weight``, ``bias``: [D]. ``pending``: [D] float32, biases that the residual stream does not contain yet.
    """
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device) if out is None else out
    launch_layer_norm(x, weight, bias, pending=pending, out=out)
    return out


def launch_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    pending: Tensor | None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    norms: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `layer_norm` and `fp8_rows.layer_norm_fp8`. ``fp8``: the rows in FP8, and their scales, to be written."""
    rows, dim = x.shape
    if not rows:
        return
    main, rest = parts_of_row(dim)
    # One warp for each row, so that no sum needs a barrier. Two rows a program, where registers suffice.
    together = 2 if dim <= 1536 else 1
    add_stride, out_stride = (0 if each is None else each.stride(0) for each in (add, out))
    _layer_norm_kernel[(triton.cdiv(rows, together),)](
        x, add, weight, bias, pending, out, norms, *(fp8 or (None, None)), x.stride(0), add_stride,
        out_stride, rows, dim, EPS, FP8_MAX, LEAST_PEAK, ROWS=together, MAIN=main, REST=rest,
        num_warps=1 if dim <= 2048 else 4,
    )  # fmt: skip


def parts_of_row(dim: int) -> tuple[int, int]:
    """Returns the largest power of two in a row, and a power of two that covers the rest. Masked lanes are not free."""
    main = 1 << (dim.bit_length() - 1)
    return main, triton.next_power_of_2(dim - main) if dim > main else 0


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
    """Adds a decode step's residual, ``stream = x + bias + sum(parts)``, in x's dtype. Returns ``LN(stream)`` [M, D].

    ``x``: [M, D]. ``parts``: tensors, each [S, M, D] or [M, D], in float32 or x's dtype, with a contiguous last
    dimension, added in order. ``bias``: [D] float32. ``weight``, ``ln_bias``: [D]. ``stream``: [M, D]; x itself if
    None. ``pdl``: launch as a programmatic dependent (sm_90), which reads the parameters early.
    """
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device) if out is None else out
    stream = x if stream is None else stream
    if not rows:
        return out
    block = triton.next_power_of_2(dim)
    pdl = pdl and x.is_cuda
    # Only CUDA supports the launch attribute.
    launch = {"launch_pdl": True} if pdl else {}
    summands, splits = part_arguments(parts)
    _add_layer_norm_kernel[(rows,)](
        x, summands, bias, weight, ln_bias, stream, out, x.stride(0), stream.stride(0), out.stride(0),
        dim, EPS, SPLITS=splits, PDL=pdl, BLOCK=block, num_warps=row_warps(block), **launch,
    )  # fmt: skip
    return out


def part_arguments(parts: Sequence[Tensor]) -> tuple[tuple[Summand, ...] | None, tuple[int, ...]]:
    """Returns what a kernel reads of ``parts``, each [S, M, D] or [M, D], and their splits; None without parts."""
    split = [part if part.dim() == 3 else part.unsqueeze(0) for part in parts]
    found = tuple(Summand(part, part.stride(0), part.stride(1)) for part in split)
    return found or None, tuple(map(len, split))


def row_warps(block: int) -> int:
    """Returns the warps for eight elements a thread: a row's latency matters more than occupancy."""
    return min(max(block // 256, 1), 16)
