"""The parts that all MoE kernels share: the formats of weights, the product of one tile, and GeGLU.

FP8 weights are multiplied as float16, which represents every e4m3 value and takes one instruction for two of them
(bfloat16 would take three more). Weights in 4 bits become float16, too (linear/int4.py). LayerNorm's outputs fit
float16. The product h * (g + 1) may not, so it is stored times 2^-6 and clamped. In this way, values up to 4 million
keep 11 bits, and subnormal values have an error of 4e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.int4 import group_of

_TRITON_TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
FIRST_CAPABILITY_WITH_FP8 = (8, 9)


class Tile(NamedTuple):
    """The outputs of a program (for up, of h and of g each), the inputs of a step, warps and stages. ``swap``: weights
    are the first operand of `dot_tile`. ``tma``: load weights with the tensor memory accelerator."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False


class TilePair(NamedTuple):
    up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of all experts of one layer.

    ``fc1``: [E, 2 * inner, D], the rows of h, then those of g. ``fc2``: [E, D, inner]. Both have the model's dtype, or
    float8_e4m3fn with row scales ``fc1_scale`` [E, 2 * inner] and ``fc2_scale`` [E, D], both float32, or 4 bits with
    scales of groups (linear/int4.py).

    Raises ValueError for inconsistent or unsupported tensors.
    """

    fc1: Tensor
    fc2: Tensor
    fc1_scale: Tensor | None = None
    fc2_scale: Tensor | None = None

    def __post_init__(self) -> None:
        num_experts, twice_inner, _ = self.fc1.shape
        numbers = 2 if self.is_int4 else 1
        own = num_experts, self.dim, twice_inner // 2 // numbers
        if self.fc2.shape != own or twice_inner % 2:
            raise ValueError(f"fc1 {tuple(self.fc1.shape)} with fc2 {tuple(self.fc2.shape)}")
        if self.fc1.dtype != self.fc2.dtype:
            raise ValueError(f"fc1 {self.fc1.dtype} with fc2 {self.fc2.dtype}")
        if not (self.fc1.is_contiguous() and self.fc2.is_contiguous()):
            raise ValueError("experts' weights must be contiguous")
        if (self.fc1_scale is None) != (self.fc2_scale is None):
            raise ValueError("both fc1 and fc2 have row scales, or neither")
        if self.is_fp8 and self.fc1_scale is None:
            raise ValueError("FP8 experts need row scales")
        if self.is_fp8 and self.fc1.is_cuda:
            capability = torch.cuda.get_device_capability(self.fc1.device)
            if capability < FIRST_CAPABILITY_WITH_FP8:
                raise ValueError(
                    f"FP8 experts need compute capability 8.9, this GPU has {capability[0]}.{capability[1]};"
                    " load them as bfloat16"
                )

    @property
    def is_fp8(self) -> bool:
        return self.fc1.dtype == torch.float8_e4m3fn

    @property
    def is_int4(self) -> bool:
        return self.fc1.dtype == torch.uint8

    @property
    def group(self) -> int:
        """The weights of a group in 4 bits; 0 in other types."""
        if not self.is_int4:
            return 0
        assert self.fc1_scale is not None and self.fc2_scale is not None
        assert self.fc1_scale.is_contiguous() and self.fc2_scale.is_contiguous()
        assert self.fc1.data_ptr() % 4 == 0 and self.fc2.data_ptr() % 4 == 0
        group = group_of(self.fc1, self.fc1_scale)
        assert group == group_of(self.fc2, self.fc2_scale), "groups of one size"
        return group

    @property
    def num_experts(self) -> int:
        return self.fc1.shape[0]

    @property
    def dim(self) -> int:
        return self.fc1.shape[2] * (2 if self.is_int4 else 1)

    @property
    def inner(self) -> int:
        return self.fc2.shape[2] * (2 if self.is_int4 else 1)

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which inputs of ``dtype`` are multiplied with these weights.

        Inputs of another half type than the weights' are rounded to that of the weights, because there are fewer of
        them. Weights in FP8 and in 4 bits become float16.
        """
        if not self.is_fp8 and not self.is_int4:
            return self.fc1.dtype
        return dtype if dtype == torch.float32 else torch.float16


def triton_type(dtype: torch.dtype) -> Any:
    return _TRITON_TYPES[dtype]


def product_scale(product_type: torch.dtype) -> float:
    """Returns the factor by which GeGLU's product is multiplied before it is stored."""
    return 2.0**-6 if product_type == torch.float16 else 1.0


@triton.jit
def dot_tile(x, w, acc, SWAP: tl.constexpr, DOT: tl.constexpr):
    """Returns acc + x [M, K] @ w [N, K].T. With SWAP, the accumulator is [N, M] and weights are the first operand. Then
    Hopper's tensor cores can read widened weights from registers, and few tokens are the narrow side."""
    if SWAP:
        acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc, input_precision="ieee")
    else:
        acc = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), acc, input_precision="ieee")
    return acc


@triton.jit
def geglu(h, g, SCALE: tl.constexpr):
    """Returns gelu(h) * (g + 1) * SCALE, with the exact GELU. A scaled result is clamped to the range of float16."""
    product = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476)) * (g + 1.0)
    if SCALE != 1.0:
        product = tl.clamp(product * SCALE, -65504.0, 65504.0)
    return product
