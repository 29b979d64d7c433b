"""spaced: a kernel that waits on the device until some time has passed since it last ended.

The host takes some milliseconds to launch new work, too long for such a pace.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LEAST_NAP_NS = 500


@triton.jit(do_not_specialize=["spacing_ns", "most_naps"])
def _spaced(last, spacing_ns, most_naps):
    end = tl.load(last) + spacing_ns
    now = _clock(end)
    naps = 0
    # Bounded, in case the clock is set back.
    while (now < end) & (naps < most_naps):
        now = _nap(end)
        naps += 1
    tl.store(last, now)


@triton.jit
def _clock(unused):
    """Returns the device's clock in nanoseconds."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 x; mov.u64 x, $1; mov.u64 $0, %globaltimer; }", "=l,l",
        [unused], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _nap(unused):
    """Sleeps for 1000 ns or up to twice as long, and returns the device's clock."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 x; mov.u64 x, $1; nanosleep.u32 1000; mov.u64 $0, %globaltimer; }", "=l,l",
        [unused], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


def spaced(last: Tensor, seconds: float) -> None:
    """Enqueues a wait until ``seconds`` after ``last``, and sets ``last`` to the end of the wait. ``last``: [1] int64
    on a CUDA device, in nanoseconds of the device's clock; 0 at first."""
    spacing_ns = round(seconds * 1e9)
    _spaced[(1,)](last, spacing_ns, spacing_ns // _LEAST_NAP_NS + 1, num_warps=1)
