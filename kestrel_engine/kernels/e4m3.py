"""Conversion to and from float8_e4m3fn in kernels: rounding by arithmetic, and widening by instructions or by bits.

Kernels read such a tensor as bytes (`as_bytes`): compilers for GPUs before 8.9 reject the dtype, and others differ in
their rounding. Rounding is to the nearest value with ties to even, as in torch. Values beyond the largest, 448, become
448. NaN stays NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bytes(pool: Tensor) -> Tensor:
    """Returns a uint8 view of a float8_e4m3fn tensor, and any other tensor as it is."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def has_units(device: torch.device) -> bool:
    """Returns whether kernels on ``device`` widen FP8 by instructions: from 8.9 on, not interpreted."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def encode_e4m3(x):
    """Returns float32 ``x`` rounded to float8_e4m3fn, as bytes."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Positive floats have the same order as their bits read as integers. 0x43E00000 is 448.
    bounded = tl.minimum(magnitude, 0x43E00000)
    # Keep 3 of 23 mantissa bits. The exponent's bias changes from 127 to 7.
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6, the step is 2**-9, which is the step of a float32 at 2**14. So adding 2**14 rounds.
    small = (bounded.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    ) - 0x46800000
    code = tl.where(bounded < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(byte, UNITS: tl.constexpr):
    """Returns the bytes of float8_e4m3fn as float32, exactly."""
    if UNITS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = byte.to(tl.uint32)
    magnitude = wide & 0x7F
    # Shift exponent and mantissa into place. The bias is then off by 2**120, also for subnormal numbers.
    bits = ((wide & 0x80) << 24) | (magnitude << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def stored(x, pool, inverse):
    """Returns float32 ``x`` in the dtype of ``pool``; for a pool of bytes, x * ``inverse`` as e4m3."""
    if pool.dtype.element_ty == tl.uint8:
        return encode_e4m3(x * inverse)
    else:
        return x.to(pool.dtype.element_ty)


@triton.jit
def widened(x, UNITS: tl.constexpr):
    """Returns values from a pool as float32. Values of an FP8 pool are not yet multiplied by their scale."""
    if x.dtype.is_uint8():
        return decode_e4m3(x, UNITS)
    else:
        return x.to(tl.float32)
