"""The noise of a draw: an id wins with the largest weight / noise, as in `runtime.sampler.exponentials`."""

from __future__ import annotations

import triton
import triton.language as tl

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def exponential(key, ids):
    """Returns the noise of ``ids`` in float64, by a hash of the row's int64 ``key`` and the id (SplitMix64)."""
    z = key.to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * _STEP
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    z = z ^ (z >> 31)
    return -tl.log(((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def contest(weights, key, ids):
    """Returns the largest weight / noise and its id. ``weights``: float64, 0 for ids that may not win."""
    scores = weights / exponential(key, ids)
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, ids, 2**31 - 1))
