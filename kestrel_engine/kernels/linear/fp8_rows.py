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

from ..layer_norm import FP8_MAX, LEAST_PEAK, launch_layer_norm, parts_of_row

FP8 = torch.float8_e4m3fn


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
    result = Fp8Rows.empty(len(x), x.shape[1], x.device)
    launch_layer_norm(x, weight, bias, pending=pending, add=add, out=out, norms=norms, fp8=result)
    return result


def quantise_rows(x: Tensor, *, gelu: bool = False, left: Tensor | None = None) -> Fp8Rows:
    """Returns ``x`` [T, K] in FP8, or its tanh GELU with ``gelu``. ``x`` may have any row stride.

    ``left``: [T, L] or None, with any row stride. It precedes x in the result's rows, without GELU: [T, L + K].
    """
    rows, dim = x.shape
    before = 0 if left is None else left.shape[1]
    result = Fp8Rows.empty(rows, before + dim, x.device)
    if rows:
        main, rest = parts_of_row(dim)
        beside = x if left is None else left
        _quantise_kernel[(rows,)](
            x, beside, *result, x.stride(0), beside.stride(0), dim, FP8_MAX, LEAST_PEAK,
            GELU=gelu, APPROXIMATE=x.is_cuda, MAIN=main, REST=rest,
            LEFT=before, LEFT_PAD=triton.next_power_of_2(max(before, 1)), num_warps=_warps(main),
        )  # fmt: skip
    return result


def _warps(main: int) -> int:
    """Returns the warps for 32 elements a thread."""
    return min(max(main // 1024, 1), 8)
