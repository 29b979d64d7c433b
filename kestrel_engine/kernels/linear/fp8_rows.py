"""Rows in FP8 with one scale each, the operands of FP8 GEMMs (``runtime/gpu/gemm.py``).

The kernels compute a LayerNorm or a GELU, or only copy, and round the result. The largest magnitude of a row becomes
FP8_MAX. float8_e4m3fn keeps 3 bits of fraction over 15 binary orders below FP8_MAX, so one scale a row loses no more
precision than the dtype itself. A row has at most 16384 elements. One program holds a whole row in registers, so
nothing is read twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import EPS

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
LEAST_PEAK = 1e-12
"""The smallest peak of a row, so that a row of zeros has a valid scale."""


class Fp8Rows(NamedTuple):
    """Rows ``values[t] * scales[t]``. ``values``: [T, K] float8_e4m3fn. ``scales``: [T, 1] float32."""

    values: Tensor
    scales: Tensor

    def at(self, rows: Tensor) -> Fp8Rows:
        """Returns the given rows [n] int64."""
        return Fp8Rows(self.values.view(torch.uint8)[rows].view(FP8), self.scales[rows])

    @classmethod
    def empty(cls, rows: int, dim: int, device: torch.device) -> Fp8Rows:
        return cls(
            torch.empty((rows, dim), dtype=FP8, device=device),
            torch.empty((rows, 1), dtype=torch.float32, device=device),
        )


@triton.jit
def _layer_norm_fp8_kernel(
    x, add, weight, bias, pending, out, norms, values, scales, x_stride, add_stride, out_stride,
    rows, dim, eps, fp8_max, least_peak,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    # A row is split into its largest power of two and the rest, as in the plain LayerNorm.
    at, to = x + row[:, None] * x_stride, values + row[:, None] * dim
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
    peak = tl.max(tl.abs(v), 1)
    if REST > 0:
        gain = tl.load(weight + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(bias + more, mask=more < dim, other=0.0).to(tl.float32)[None, :]
        w = w * factor * gain + shift
        peak = tl.maximum(peak, tl.max(tl.abs(w), 1))
    if norms is not None:
        squares = tl.sum(v * v, 1)
        if REST > 0:
            squares += tl.sum(w * w, 1)
        tl.store(norms + row, tl.sqrt(squares), mask=row < rows)
    peak = tl.maximum(peak, least_peak)
    tl.store(scales + row, peak / fp8_max, mask=row < rows)
    up = (fp8_max / peak)[:, None]
    tl.store(to + cols[None, :], (v * up).to(values.dtype.element_ty), mask=there)
    if out is not None:
        plain = out + row[:, None] * out_stride
        tl.store(plain + cols[None, :], v.to(out.dtype.element_ty), mask=there)
    if REST > 0:
        tl.store(to + more[None, :], (w * up).to(values.dtype.element_ty), mask=there & inside)
        if out is not None:
            tl.store(plain + more[None, :], w.to(out.dtype.element_ty), mask=there & inside)


@triton.jit
def gelu_tanh(v, APPROXIMATE: tl.constexpr):
    """Returns the tanh form of GELU. ``APPROXIMATE``: use the GPU's tanh instruction, with an error of 2**-11. With an
    exponential and a division, this pass would compute for as long as it waits for memory."""
    z = 0.7978845608028654 * v * (1.0 + 0.044715 * v * v)
    if APPROXIMATE:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
        half = 0.5 * v
        gelu = half * t + half
    else:
        # The logistic function of 2 * z, with a bounded exponent, so that it does not overflow.
        gelu = v / (1.0 + tl.exp(tl.minimum(-2.0 * z, 80.0)))
    return gelu


@triton.jit
def _quantise_kernel(
    x, left, values, scales, x_stride, left_stride, dim, fp8_max, least_peak,
    GELU: tl.constexpr, APPROXIMATE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    LEFT: tl.constexpr, LEFT_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, to = x + row * x_stride, values + row * (LEFT + dim) + LEFT
    cols = tl.arange(0, MAIN)
    v = tl.load(at + cols).to(tl.float32)
    if GELU:
        v = gelu_tanh(v, APPROXIMATE)
    peak = tl.max(tl.abs(v), 0)
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        inside = more < dim
        w = tl.load(at + more, mask=inside, other=0.0).to(tl.float32)
        if GELU:
            w = gelu_tanh(w, APPROXIMATE)
        peak = tl.maximum(peak, tl.max(tl.abs(w), 0))
    if LEFT > 0:
        first = tl.arange(0, LEFT_PAD)
        before = tl.load(left + row * left_stride + first, mask=first < LEFT, other=0.0)
        before = before.to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(before), 0))
    peak = tl.maximum(peak, least_peak)
    tl.store(scales + row, peak / fp8_max)
    up = fp8_max / peak
    tl.store(to + cols, (v * up).to(values.dtype.element_ty))
    if REST > 0:
        tl.store(to + more, (w * up).to(values.dtype.element_ty), mask=inside)
    if LEFT > 0:
        rounded = (before * up).to(values.dtype.element_ty)
        tl.store(to - LEFT + first, rounded, mask=first < LEFT)


def layer_norm_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    pending: Tensor | None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    norms: Tensor | None = None,
) -> Fp8Rows:
    """Adds ``add`` to ``x`` in place, rounded to x's dtype, and returns ``LN(x + pending)`` in FP8.

    ``x``: [T, D]. ``add``: [T, D] or None. ``out``: [T, D] or None, filled with the LayerNorm before rounding to FP8.
    All may have any row stride. ``weight``, ``bias``: [D]. ``pending``: [D] float32, biases that the residual stream
    does not contain; they are not added to ``x``. ``norms``: [T] float32 or None, filled with the Euclidean norms of
    the LayerNorm's rows. The statistics are those of `layer_norm`.
    """
    rows, dim = x.shape
    result = Fp8Rows.empty(rows, dim, x.device)
    if rows:
        main, rest = _parts(dim)
        # One warp for each row, so that no sum needs a barrier. Two rows a program, where registers suffice.
        together = 2 if dim <= 1536 else 1
        add_stride, out_stride = (0 if each is None else each.stride(0) for each in (add, out))
        _layer_norm_fp8_kernel[(triton.cdiv(rows, together),)](
            x, add, weight, bias, pending, out, norms, *result, x.stride(0), add_stride, out_stride,
            rows, dim, EPS, FP8_MAX, LEAST_PEAK, ROWS=together, MAIN=main, REST=rest,
            num_warps=1 if dim <= 2048 else 4,
        )  # fmt: skip
    return result


def quantise_rows(x: Tensor, *, gelu: bool = False, left: Tensor | None = None) -> Fp8Rows:
    """Returns ``x`` [T, K] in FP8, or its tanh GELU with ``gelu``. ``x`` may have any row stride.

    ``left``: [T, L] or None, with any row stride. It precedes x in the result's rows, without GELU: [T, L + K].
    """
    rows, dim = x.shape
    before = 0 if left is None else left.shape[1]
    result = Fp8Rows.empty(rows, before + dim, x.device)
    if rows:
        main, rest = _parts(dim)
        beside = x if left is None else left
        _quantise_kernel[(rows,)](
            x, beside, *result, x.stride(0), beside.stride(0), dim, FP8_MAX, LEAST_PEAK,
            GELU=gelu, APPROXIMATE=x.is_cuda, MAIN=main, REST=rest,
            LEFT=before, LEFT_PAD=triton.next_power_of_2(max(before, 1)), num_warps=_warps(main),
        )  # fmt: skip
    return result


def _parts(dim: int) -> tuple[int, int]:
    """Returns the largest power of two in a row, and a power of two that covers the rest. Masked lanes are not free."""
    main = 1 << (dim.bit_length() - 1)
    return main, triton.next_power_of_2(dim - main) if dim > main else 0


def _warps(main: int) -> int:
    """Returns the warps for 32 elements a thread."""
    return min(max(main // 1024, 1), 8)
