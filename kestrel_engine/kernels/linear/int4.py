"""Weights in 4 bits on a GPU: products widen them in their tiles; for many rows, one pass widens a matrix for cuBLAS.

The form is the third one of models/weight_only.py: the high nibbles of ``group`` bytes are one group of a row, their
low nibbles the next one. So a tile of bytes gives two tiles of weights, each with one scale and one zero point a row.

`widen`, and products in float32, compute a weight in float32 and round it once. Products in half precision multiply the
numbers themselves, which their type has exactly, and apply scale and zero point to the sum of a group. Such a weight is
not rounded at all. A number is OR-ed into the last bits of a power of two, whose part of the sum goes with that of the
zero point. This takes one instruction for two weights, where a conversion of each took most of a product's time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gelu import gelu_tanh

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
def offset_numbers(packed, HIGH: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns the numbers of the high or the low nibbles of ``packed``, plus `offset_of` DTYPE, a type of two bytes."""
    BITS: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
    if PTX:
        # Four bytes at once: two of them to each register, then (value >> SHIFT & 15) | BITS in both halves of it.
        SHIFT: tl.constexpr = 4 * HIGH
        BOTH: tl.constexpr = BITS * 0x10001
        found = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            shr.b32 a, a, {SHIFT};
            shr.b32 b, b, {SHIFT};
            lop3.b32 $0, a, 0x000F000F, {BOTH}, 0xEA;
            lop3.b32 $1, b, 0x000F000F, {BOTH}, 0xEA;
            }}""",
            "=r,=r,r", [packed], dtype=tl.int16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        found = ((packed.to(tl.int16) >> (4 * HIGH)) & 15) | BITS
    return found.to(DTYPE, bitcast=True)


@triton.jit
def offset_of(DTYPE: tl.constexpr):
    return 128.0 if DTYPE == tl.bfloat16 else 1024.0


@triton.jit
def scaled_sums(numbers, ones, x, scales, valid):
    """Returns the sums [N, M] of one group. ``numbers`` [N, g]: as of `offset_numbers`. ``x``: [M, g]. ``scales``: [N]
    addresses of scale and zero point."""
    scale = tl.load(scales, mask=valid, other=0.0).to(tl.float32)[:, None]
    zero = tl.load(scales + 1, mask=valid, other=0.0).to(tl.float32)[:, None]
    transposed = tl.trans(x)
    total = tl.dot(ones, transposed)
    return scale * (tl.dot(numbers, transposed) - (zero + offset_of(x.dtype)) * total)


@triton.jit
def _one_of_four(packed, J: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the value J of the four of a type of two bytes that an int64 holds, in float32."""
    return (packed >> (16 * J)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _masked(bits, PTX: tl.constexpr):
    """Returns ``bits & 0xF0000 | 0x43000000``, which the compiler would make two instructions."""
    if PTX:
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF0000, 0x43000000, 0xEA;",
            "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = (bits & 0xF0000) | 0x43000000
    return found


@triton.jit
def _sum_of_four(words, x, HIGH: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns the products of the four numbers in the high or the low nibbles of ``words`` int32 with the four values
    in ``x`` int64, as a sum for each word, and the sums of the values."""
    total = tl.zeros_like(x).to(tl.float32)
    for j in tl.static_range(4):
        total += _one_of_four(x, j, DTYPE)
    product = total * -128.0
    for j in tl.static_range(4):
        # The number j in the bits of 1 to 8 of a float32 of 128.
        if 16 - 8 * j - 4 * HIGH >= 0:
            bits = words << (16 - 8 * j - 4 * HIGH)
        else:
            bits = words >> (8 * j + 4 * HIGH - 16)
        number = _masked(bits, PTX).to(tl.float32, bitcast=True)
        product += number * _one_of_four(x, j, DTYPE)
    return product, total


@triton.jit
def int4_row_kernel(
    x, words, bias, scales, out, n, k_per_split, k, w_stride, scale_stride, split_stride, gelu_from,
    HAS_BIAS: tl.constexpr, HAS_GELU: tl.constexpr, X_DTYPE: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Multiplies one row of x [K / 4] int64, of four values each, with ``words`` [N, K / 8] int32, of four bytes each.

    ``scales``: [N, K / g / 2] int64, of two scales with their zero points each, or [N, K / g, 2] float32. A tile is
    [BLOCK_N, PAIRS of groups, GROUP / 4 words].
    """
    WORDS: tl.constexpr = GROUP // 4
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * k_per_split
    end = tl.minimum(begin + k_per_split, k)
    row = first + tl.arange(0, BLOCK_N)
    keep_n = row < n
    keep = keep_n[:, None, None]
    in_tile, lane = tl.arange(0, PAIRS)[None, :, None], tl.arange(0, WORDS)[None, None, :]
    w_rows = words + row.to(tl.int64)[:, None, None] * w_stride + in_tile * WORDS + lane
    scale_rows = scales + row.to(tl.int64)[:, None, None] * scale_stride
    x_at = x + in_tile * (2 * WORDS) + lane
    if HAS_BIAS:
        owed = tl.load(bias + row, mask=keep_n, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(
        w_rows + begin // 8,
        mask=keep & (begin // (2 * GROUP) + in_tile < end // (2 * GROUP)),
        other=0,
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, PAIRS, WORDS], tl.float32)
    for at in range(begin, end, 2 * GROUP * PAIRS):
        pair = at // (2 * GROUP) + in_tile
        there = pair < end // (2 * GROUP)
        if at > begin:
            w = tl.load(w_rows + at // 8, mask=keep & there, other=0)
        if SCALE_DTYPE == tl.float32:
            of_pair = scale_rows + 4 * pair
            high_scale = tl.load(of_pair, mask=keep & there, other=0.0)
            high_zero = tl.load(of_pair + 1, mask=keep & there, other=0.0)
            low_scale = tl.load(of_pair + 2, mask=keep & there, other=0.0)
            low_zero = tl.load(of_pair + 3, mask=keep & there, other=0.0)
        else:
            four = tl.load(scale_rows + pair, mask=keep & there, other=0)
            high_scale = _one_of_four(four, 0, SCALE_DTYPE)
            high_zero = _one_of_four(four, 1, SCALE_DTYPE)
            low_scale = _one_of_four(four, 2, SCALE_DTYPE)
            low_zero = _one_of_four(four, 3, SCALE_DTYPE)
        high_x = tl.load(x_at + at // 4, mask=there, other=0)
        low_x = tl.load(x_at + at // 4 + WORDS, mask=there, other=0)
        product, total = _sum_of_four(w, high_x, 1, X_DTYPE, PTX)
        acc += high_scale * (product - high_zero * total)
        product, total = _sum_of_four(w, low_x, 0, X_DTYPE, PTX)
        acc += low_scale * (product - low_zero * total)
    sums = tl.sum(tl.sum(acc, axis=2), axis=1)
    if HAS_BIAS:
        sums += owed
    if HAS_GELU:
        sums = tl.where(row >= gelu_from, gelu_tanh(sums), sums)
    out += tl.program_id(1).to(tl.int64) * split_stride
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=keep_n)


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
