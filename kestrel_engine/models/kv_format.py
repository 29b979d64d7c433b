"""How keys and values lie in a pool: in the model's type, or as float8_e4m3fn, eight bits, with two scales a layer.

Owns what a stored number means (times its scale it is the real value) and torch's way to write and read it. Kernels do
the same; they round alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn, which has no infinity: torch makes NaN of what is larger."""

Scales = tuple[float, float]
"""Of one layer's keys and of its values."""
UNSCALED: Scales = (1.0, 1.0)


def store(pool: Tensor, slots: Tensor, x: Tensor, scale: float) -> None:
    """``x`` [n, heads, head_dim] to ``slots`` [n] of ``pool`` [num_slots, heads, head_dim]. In eight bits it is divided
    by ``scale`` and rounded to the nearest, ties to even; beyond `LARGEST` it becomes that. NaN stays NaN."""
    if pool.dtype != EIGHT_BITS:
        pool.index_copy_(0, slots, x)
        return
    # Kernels multiply by the reciprocal, too: a division would round some numbers otherwise.
    rounded = (x.float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST).to(EIGHT_BITS)
    # Copies by index don't know the type.
    _bytes(pool).index_copy_(0, slots, _bytes(rounded))


def gather(pool: Tensor, slots: slice | Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The real values at ``slots`` [...] of ``pool`` [num_slots, ...] in ``dtype``, the pool's own if it has not eight
    bits; a view then where ``slots`` is a slice."""
    kept = _bytes(pool)
    # index_select is five times faster than indexing with a tensor on CPU (81 against 486 us for 745 positions of 256).
    found = kept[slots] if isinstance(slots, slice) else kept.index_select(0, slots)
    if pool.dtype != EIGHT_BITS:
        return found
    # Each stored number is one of ``dtype``'s, and the product is rounded once: no wider copy is needed.
    return found.view(EIGHT_BITS).to(dtype).mul_(scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == EIGHT_BITS else tensor
