"""The tanh GELU of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(v):
    """Returns 0.5 v (1 + tanh(z)) as v sigmoid(2 z), which needs no tanh. The exponential of -|2 z| can't overflow."""
    twice_z = 1.5957691216057308 * (v + 0.044715 * v * v * v)
    small = tl.exp(-tl.abs(twice_z))
    return v * tl.where(twice_z >= 0, 1.0, small) / (1.0 + small)
