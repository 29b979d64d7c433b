"""Weights in 4 bits on a GPU: products widen them in their tiles; for many rows, one pass widens a matrix for cuBLAS.

The form is the third one of models/weight_only.py: the high nibbles of ``group`` bytes are one group of a row, their
low nibbles the next one. So a tile of bytes gives two tiles of weights, each with one scale and one zero point a row.
A weight is computed in float32 and rounded once to the type of the product, as if it had been widened when it was
loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""The rows of a program that widens."""


def group_of(weight: Tensor, scales: Tensor) -> int:
    """Returns the weights of a group of ``weight`` [..., N, K / 2] with ``scales`` [..., N, K / g, 2]."""
    assert weight.dtype == torch.uint8 and scales.dim() == weight.dim() + 1, weight.dtype
    assert scales.stride(-1) == 1 and scales.stride(-2) == 2 and weight.stride(-1) == 1
    return 2 * weight.shape[-1] // scales.shape[-2]


def widen(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values [N, K] in ``dtype`` of ``weight`` [N, K / 2], which may have any row stride."""
    n, half = weight.shape
    group = group_of(weight, scales)
    out = torch.empty(n, 2 * half, dtype=dtype, device=weight.device)
    _widen_kernel[(triton.cdiv(n, _ROWS), half // group)](
        weight, scales, out, n, weight.stride(0), scales.stride(0), out.stride(0),
        ROWS=_ROWS, GROUP=group, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def two_groups(packed, scales, valid, DTYPE: tl.constexpr):
    """Returns the weights of the high and of the low nibbles of ``packed`` [N, g], both [N, g] in DTYPE.

    ``scales``: [N] addresses of scale and zero point of the first group, before those of the second. Rows that are not
    ``valid`` [N] are zero.
    """
    first_scale = tl.load(scales, mask=valid, other=0.0).to(tl.float32)[:, None]
    first_zero = tl.load(scales + 1, mask=valid, other=0.0).to(tl.float32)[:, None]
    second_scale = tl.load(scales + 2, mask=valid, other=0.0).to(tl.float32)[:, None]
    second_zero = tl.load(scales + 3, mask=valid, other=0.0).to(tl.float32)[:, None]
    bits = packed.to(tl.int32)
    # 2^23 with a number in its last bits: this takes a fraction of the time of a conversion.
    high = ((bits >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    high = (high - first_zero) * first_scale
    low = (low - second_zero) * second_scale
    return high.to(DTYPE), low.to(DTYPE)


@triton.jit
def _widen_kernel(
    weight, scales, out, n, w_stride, scale_stride, out_stride, ROWS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1)
    lane = tl.arange(0, GROUP)
    valid = row < n
    at = weight + row[:, None] * w_stride + pair * GROUP + lane[None, :]
    packed = tl.load(at, mask=valid[:, None], other=0)
    high, low = two_groups(
        packed, scales + row * scale_stride + 4 * pair, valid, out.dtype.element_ty
    )
    to = out + row[:, None] * out_stride + 2 * pair * GROUP + lane[None, :]
    tl.store(to, high, mask=valid[:, None])
    tl.store(to + GROUP, low, mask=valid[:, None])
