"""StepBuffers: what the kernels of a decode step hand on. All steps share them, so they run one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .layers import Fp8Products


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The norm [M, dim], the result of a layer's first GEMM [M, N], and the norm of experts ahead, all flat."""

    u: Tensor
    read: Tensor
    routed: Tensor

    @classmethod
    def allocate(cls, like: Tensor, rows: int, dim: int, widest: int, ahead: int) -> StepBuffers:
        """``rows``, ``ahead``: the most rows of a step, and of one whose experts begin ahead. ``widest``: the most
        columns of a first GEMM."""
        return cls(*(like.new_empty(n) for n in (rows * dim, rows * widest, ahead * dim)))


@dataclass(frozen=True, slots=True)
class NarrowWeights:
    """What steps with weights in FP8 use: the layers' weights, and buffers in float16 for ``max_rows``."""

    layers: Sequence[Fp8Products]
    max_rows: int
    buffers: StepBuffers


def shaped(buffer: Tensor, *shape: int) -> Tensor:
    """Returns the beginning of a flat buffer as a view of ``shape``."""
    return buffer[: math.prod(shape)].view(shape)
