"""float8_e4m3fn in kernels: rounding to it by arithmetic, and back by the device's own units or by bits.

Kernels see such a tensor as bytes (`as_bytes`): compilers for cards before 8.9 refuse the type, and those that know it
round to it in different ways. Rounding here is to the nearest, ties to even, as torch does; what is beyond 448, the
largest finite number, becomes 448, and NaN stays NaN, so that a fault still shows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bytes(pool: Tensor) -> Tensor:
    """A float8_e4m3fn tensor as uint8, any other as it is; a view."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def has_units(device: torch.device) -> bool:
    """Whether kernels on ``device`` convert by instruction: from compute capability 8.9 on, never by interpretation."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def encode_e4m3(x):
    """float32 -> bytes of the nearest float8_e4m3fn."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # As integers, positive floats keep their order: 0x43E00000 is 448.
    bounded = tl.minimum(magnitude, 0x43E00000)
    # Three bits of mantissa stay of 23; the exponent's bias falls from 127 to 7.
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are 2**-9, those of a float32 at 2**14: adding that rounds.
    small = (bounded.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    ) - 0x46800000
    code = tl.where(bounded < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(byte, UNITS: tl.constexpr):
    """Bytes of float8_e4m3fn -> float32, exactly."""
    if UNITS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = byte.to(tl.uint32)
    magnitude = wide & 0x7F
    # Exponent and mantissa in their places, but for the bias: off by 2**120, subnormal numbers too.
    bits = ((wide & 0x80) << 24) | (magnitude << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def stored(x, pool, inverse):
    """float32 ``x`` as ``pool`` keeps it: rounded to its type, or where that is bytes the e4m3 of x * ``inverse``."""
    if pool.dtype.element_ty == tl.uint8:
        return encode_e4m3(x * inverse)
    else:
        return x.to(pool.dtype.element_ty)


@triton.jit
def widened(x, UNITS: tl.constexpr):
    """What was loaded from a pool, as float32: of bytes the e4m3 numbers, not yet times their scale."""
    if x.dtype.is_uint8():
        return decode_e4m3(x, UNITS)
    else:
        return x.to(tl.float32)
