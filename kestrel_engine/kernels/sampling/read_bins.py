"""Reads a region head: the best bin of each row of logits, and the probability of the bins near it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logits import LARGEST


def read_bins(logits: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Returns the best bin [R] int32 of each row of ``logits`` [R, B], and the probability [R] float32 of the bins at
    most ``reach`` bins away from it. ``logits``: float32, bfloat16 or float16, with any row stride. Of equally good
    bins, the first one wins. If a logit is not finite, the probability is NaN and the bin is arbitrary. Does not wait
    for the device."""
    rows, num_bins = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    bins = torch.empty(rows, dtype=torch.int32, device=logits.device)
    near = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _read_kernel[(rows,)](
            logits,
            logits.stride(0),
            num_bins,
            bins,
            near,
            REACH=reach,
            BLOCK=triton.next_power_of_2(num_bins),
            num_warps=4,
        )
    return bins, near


@triton.jit
def _read_kernel(
    logits, stride, num_bins, bins, near, REACH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < num_bins
    x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    # This comparison is false for NaN.
    is_bad = inside & ((tl.abs(x) <= LARGEST) == 0)
    num_bad = tl.sum(is_bad.to(tl.int32))
    x = tl.where(is_bad, float("-inf"), x)
    best = tl.maximum(tl.max(x), -LARGEST)
    index = tl.min(tl.where(x == best, column, num_bins - 1))
    tl.store(bins + row, index)
    weights = tl.exp(x - best)
    # The sum is at least 1, the best bin's own term, unless no logit is finite.
    total = tl.maximum(tl.sum(weights), 1.0)
    around = tl.sum(tl.where(tl.abs(column - index) <= REACH, weights, 0.0))
    # Two sums of the same terms may differ by rounding.
    probability = tl.minimum(around / total, 1.0)
    tl.store(near + row, tl.where(num_bad > 0, float("nan"), probability))
