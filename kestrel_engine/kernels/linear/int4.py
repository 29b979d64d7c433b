"""Weights in 4 bits on a GPU: products widen them in their tiles; for many rows, one pass widens a matrix for cuBLAS.

The form is the third one of models/weight_only.py: the high nibbles of ``group`` bytes are one group of a row, their
low nibbles the next one. So a tile of bytes gives two tiles of weights, each with one scale and one zero point a row.

`widen`, and products in float32, compute a weight in float32 and round it once. Products in half precision multiply the
numbers themselves, which their type has exactly, and apply scale and zero point to the sum of a group. Such a weight is
not rounded at all. A number is OR-ed into the last bits of a power of two, whose part of the sum goes with that of the
zero point. This takes one instruction for two weights, where a conversion of each took most of a product's time.

Experts (moe/) multiply weights in float16 (`product_groups`): two numbers become two weights by one multiply-add. The
scale, its product with the zero point, and the weight are rounded to float16.
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
    # Kernels read scales and zero points of two groups at once.
    assert scales.data_ptr() % 8 == 0 and scales.stride(-3) % 4 == 0, scales.stride()
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
def scales_of_pair(scales, pair, mask):
    """Returns scale and zero point of the first, then of the second group of ``pair``, in float32.

    ``scales``: addresses of rows of them, aligned to 8 bytes. One load fetches four values of two bytes, which the
    pipeline of a loop can do ahead.
    """
    words = scales.to(tl.pointer_type(tl.int64))
    if scales.dtype.element_ty == tl.float32:
        one = tl.load(words + 2 * pair, mask=mask, other=0)
        two = tl.load(words + 2 * pair + 1, mask=mask, other=0)
        first_scale = one.to(tl.int32).to(tl.float32, bitcast=True)
        first_zero = (one >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        second_scale = two.to(tl.int32).to(tl.float32, bitcast=True)
        second_zero = (two >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        four = tl.load(words + pair, mask=mask, other=0)
        DTYPE: tl.constexpr = scales.dtype.element_ty
        first_scale, first_zero = _one_of_four(four, 0, DTYPE), _one_of_four(four, 1, DTYPE)
        second_scale, second_zero = _one_of_four(four, 2, DTYPE), _one_of_four(four, 3, DTYPE)
    return first_scale, first_zero, second_scale, second_zero


@triton.jit
def two_groups(packed, scales, pair, valid, DTYPE: tl.constexpr):
    """Returns the weights of the high and of the low nibbles of ``packed`` [N, g], both [N, g] in DTYPE.

    ``scales``: [N] as of `scales_of_pair`. Rows that are not ``valid`` [N] are zero.
    """
    first_scale, first_zero, second_scale, second_zero = scales_of_pair(scales, pair, valid)
    bits = packed.to(tl.int32)
    # 2^23 with a number in its last bits: this takes a fraction of the time of a conversion.
    high = ((bits >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    high = (high - first_zero[:, None]) * first_scale[:, None]
    low = (low - second_zero[:, None]) * second_scale[:, None]
    return high.to(DTYPE), low.to(DTYPE)


@triton.jit
def product_groups(packed, scales, pair, valid, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns what `two_groups` does, in DTYPE float32 or float16. In float16, a weight is one multiply-add of its
    number, its scale, and the scale times the zero point, which are rounded."""
    if DTYPE == tl.float32:
        high, low = two_groups(packed, scales, pair, valid, DTYPE)
    else:
        high, low = _half_groups(packed, scales, pair, valid, PTX)
    return high, low


@triton.jit
def _half_groups(packed, scales, pair, valid, PTX: tl.constexpr):
    scale, zero, low_scale, low_zero = scales_of_pair(scales, pair, valid)
    scale, low_scale = scale[:, None].to(tl.float16), low_scale[:, None].to(tl.float16)
    # Of the rounded scale, whose error then is that of the weight alone.
    offset = (zero[:, None] * -scale.to(tl.float32)).to(tl.float16)
    low_offset = (low_zero[:, None] * -low_scale.to(tl.float32)).to(tl.float16)
    if PTX:
        # Two bytes to the halves of a register. A half then holds 1024 plus 16 times the high number, or plus the low
        # number. Both become the numbers themselves, exactly.
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            cvt.u32.u16 a, $2;
            prmt.b32 a, a, 0, 0x4140;
            lop3.b32 b, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 a, a, 0x00F000F0, 0x64006400, 0xEA;
            .reg .b32 sixteenth, sixty_four, many;
            mov.b32 sixteenth, 0x2C002C00;
            mov.b32 sixty_four, 0xD400D400;
            mov.b32 many, 0xE400E400;
            fma.rn.f16x2 a, a, sixteenth, sixty_four;
            add.rn.f16x2 b, b, many;
            fma.rn.f16x2 $0, a, $3, $4;
            fma.rn.f16x2 $1, b, $5, $6;
            }""",
            "=r,=r,h,r,r,r,r", [packed, scale, offset, low_scale, low_offset],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        high = (packed >> 4).to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)
        low = (packed & 15).to(tl.float32) * low_scale.to(tl.float32) + low_offset.to(tl.float32)
        high, low = high.to(tl.float16), low.to(tl.float16)
    return high, low


@triton.jit
def offset_numbers(packed, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns the numbers of the high and of the low nibbles of ``packed``, plus `offset_of` DTYPE, a type of two
    bytes."""
    BITS: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
    if PTX:
        # Two bytes to the halves of a register, then (value >> 4 & 15) | BITS and (value & 15) | BITS in both.
        BOTH: tl.constexpr = BITS * 0x10001
        high, low = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b;
            cvt.u32.u16 a, $2;
            prmt.b32 a, a, 0, 0x4140;
            shr.b32 b, a, 4;
            lop3.b32 $0, b, 0x000F000F, {BOTH}, 0xEA;
            lop3.b32 $1, a, 0x000F000F, {BOTH}, 0xEA;
            }}""",
            "=r,=r,h", [packed], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        high, low = packed.to(tl.int16) >> 4 | BITS, packed.to(tl.int16) & 15 | BITS
    return high.to(DTYPE, bitcast=True), low.to(DTYPE, bitcast=True)


@triton.jit
def offset_of(DTYPE: tl.constexpr):
    return 128.0 if DTYPE == tl.bfloat16 else 1024.0


@triton.jit
def scaled_sums(numbers, ones, x, scale, zero):
    """Returns the sums [N, M] of one group. ``numbers`` [N, g]: as of `offset_numbers`. ``x``: [M, g]. ``scale``,
    ``zero``: [N] float32."""
    transposed = tl.trans(x)
    total = tl.dot(ones, transposed)
    offset = (zero + offset_of(x.dtype))[:, None]
    return scale[:, None] * (tl.dot(numbers, transposed) - offset * total)


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
def add_row_products(
    acc, words, x, scales, pair, keep, there, GROUP: tl.constexpr, X_DTYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Returns ``acc`` plus the products of ``words`` [N, P, GROUP / 4] int32 with one row, as a sum for each word.

    ``x``: the address of the row's values, as int64 of four values of X_DTYPE. ``scales``: [N, 1, 1] as of
    `scales_of_pair`. ``pair``: [1, P, 1]. Words count if ``keep`` [N, 1, 1] and ``there`` [1, P, 1].
    """
    WORDS: tl.constexpr = GROUP // 4
    x_at = x + pair * (2 * WORDS) + tl.arange(0, WORDS)[None, None, :]
    high_x = tl.load(x_at, mask=there, other=0)
    low_x = tl.load(x_at + WORDS, mask=there, other=0)
    scale, zero, low_scale, low_zero = scales_of_pair(scales, pair, keep & there)
    product, total = _sum_of_four(words, high_x, 1, X_DTYPE, PTX)
    acc += scale * (product - zero * total)
    product, total = _sum_of_four(words, low_x, 0, X_DTYPE, PTX)
    return acc + low_scale * (product - low_zero * total)


@triton.jit
def int4_row_kernel(
    x, words, bias, scales, out, n, k_per_split, k, w_stride, scale_stride, split_stride, gelu_from,
    HAS_BIAS: tl.constexpr, HAS_GELU: tl.constexpr, X_DTYPE: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiplies one row of x [K / 4] int64, of four values each, with ``words`` [N, K / 8] int32, of four bytes each.

    ``scales``: [N, K / g, 2]. A tile is [BLOCK_N, PAIRS of groups, GROUP / 4 words].
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
        acc = add_row_products(acc, w, x, scale_rows, pair, keep, there, GROUP, X_DTYPE, PTX)
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
    high, low = two_groups(packed, scales + row * scale_stride, pair, valid, out.dtype.element_ty)
    to = out + row[:, None] * out_stride + 2 * pair * GROUP + lane[None, :]
    tl.store(to, high, mask=valid[:, None])
    tl.store(to + GROUP, low, mask=valid[:, None])
