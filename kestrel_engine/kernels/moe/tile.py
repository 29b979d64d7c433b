"""What both paths of a mixture of experts share: the forms weights may have, one tile's product, and GeGLU.

FP8 weights are multiplied as float16, which holds every e4m3 value and costs one instruction for two of them (bfloat16
would cost three more). LayerNorm's outputs fit float16 well. The product h * (g + 1) might not, so it is stored
times 2^-6 and clamped there: up to 4 million is exact to 11 bits, and what falls below normal numbers is off by 4e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TRITON_TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
FIRST_CAPABILITY_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of all experts of one layer.

    ``fc1`` [E, 2 * inner, D], rows of h then g, and ``fc2`` [E, D, inner]: the model's dtype, or float8_e4m3fn with
    ``fc1_scale`` [E, 2 * inner] and ``fc2_scale`` [E, D] float32, one factor a row.
    """

    fc1: Tensor
    fc2: Tensor
    fc1_scale: Tensor | None = None
    fc2_scale: Tensor | None = None

    def __post_init__(self) -> None:
        num_experts, twice_inner, dim = self.fc1.shape
        if self.fc2.shape != (num_experts, dim, twice_inner // 2) or twice_inner % 2:
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
                    f"FP8 experts need compute capability 8.9, this card has {capability[0]}.{capability[1]}:"
                    " load them as bfloat16"
                )

    @property
    def is_fp8(self) -> bool:
        return self.fc1.dtype == torch.float8_e4m3fn

    @property
    def num_experts(self) -> int:
        return self.fc1.shape[0]

    @property
    def dim(self) -> int:
        return self.fc1.shape[2]

    @property
    def inner(self) -> int:
        return self.fc2.shape[2]

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        """In what type inputs of ``dtype`` are multiplied with these weights."""
        if dtype == torch.float32:
            return dtype
        return torch.float16 if self.is_fp8 else dtype


def triton_type(dtype: torch.dtype) -> Any:
    return _TRITON_TYPES[dtype]


def product_scale(product_type: torch.dtype) -> float:
    """By what GeGLU's product is multiplied where it is stored."""
    return 2.0**-6 if product_type == torch.float16 else 1.0


@triton.jit
def dot_tile(x, w, acc, SWAP: tl.constexpr, DOT: tl.constexpr):
    """acc + x [M, K] @ w [N, K].T; with SWAP the accumulator is [N, M]: weights come first, which lets Hopper's
    tensor cores take converted weights from registers, and few tokens as the narrow side."""
    if SWAP:
        acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc, input_precision="ieee")
    else:
        acc = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), acc, input_precision="ieee")
    return acc


@triton.jit
def geglu(h, g, SCALE: tl.constexpr):
    """gelu(h) * (g + 1) * SCALE, by erf; where it is scaled it goes to float16, and is clamped to what fits."""
    product = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476)) * (g + 1.0)
    if SCALE != 1.0:
        product = tl.clamp(product * SCALE, -65504.0, 65504.0)
    return product
