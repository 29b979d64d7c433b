"""Moondream 3's tau factors, inside a kernel (docs/develop/moondream.md, section 6)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tau_factors(raw, part_stride, turn, known, position, PARTS: tl.constexpr):
    """Returns tanh(content) + 0.5 + sigmoid(alpha * ln(p + 1)), [N] float32. ``raw``: N pointers to content, the sum of
    PARTS values that lie ``part_stride`` apart. ``turn``: alpha, [N]. ``known``: which of the N are read. ``position``:
    p, [N] or a scalar."""
    if PARTS == 1:
        content = tl.load(raw, mask=known, other=0.0).to(tl.float32)
    else:
        some = tl.zeros([32, raw.shape[0]], tl.float32)
        for first in tl.static_range(0, PARTS, 32):
            part = first + tl.arange(0, 32)
            there = (part < PARTS)[:, None] & known[None, :]
            some += tl.load(raw[None, :] + part[:, None] * part_stride, mask=there, other=0.0)
        content = tl.sum(some, axis=0)
    place = tl.sigmoid(turn * tl.log(position.to(tl.float32) + 1.0))
    return 2.0 * tl.sigmoid(2.0 * content) - 0.5 + place  # tanh(x) = 2 * sigmoid(2x) - 1
