"""Layer: one mixture of experts with random weights, as tensors for the kernels and as the models package's Moe."""

import torch
from torch import Tensor

from kestrel_engine.models.layers import Linear
from kestrel_engine.models.text import Moe
from kestrel_engine.models.weight_only import to_groups
from tests.kernels.tensors import DEVICE


class Layer:
    """Weights such that activations keep a size near 1. With ``fp8`` they are stored so, with row scales; with
    ``group``, in 4 bits with scales of groups."""

    def __init__(
        self,
        *,
        num_experts: int,
        k: int,
        dim: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        group: int = 0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.k = k
        self.bias = torch.randn(num_experts, device=DEVICE)
        self.router = Linear(torch.randn(num_experts, dim, device=DEVICE) * dim**-0.5, self.bias)
        self.fc1 = torch.randn(num_experts, 2 * inner, dim, device=DEVICE) * dim**-0.5
        self.fc2 = torch.randn(num_experts, dim, inner, device=DEVICE) * inner**-0.5
        self.fc1_scale: Tensor | None = None
        self.fc2_scale: Tensor | None = None
        if group:
            self.fc1, self.fc1_scale = _in_groups(self.fc1, group)
            self.fc2, self.fc2_scale = _in_groups(self.fc2, group)
        elif fp8:
            self.fc1, self.fc1_scale = _quantized(self.fc1)
            self.fc2, self.fc2_scale = _quantized(self.fc2)
        else:
            self.fc1, self.fc2 = self.fc1.to(dtype), self.fc2.to(dtype)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.fc1, self.fc2, self.fc1_scale, self.fc2_scale

    def in_scales_of(self, dtype: torch.dtype) -> None:
        assert self.fc1_scale is not None and self.fc2_scale is not None
        self.fc1_scale, self.fc2_scale = self.fc1_scale.to(dtype), self.fc2_scale.to(dtype)

    def logits(self, u: Tensor) -> Tensor:
        return self.router(u.float())

    def expected(self, u: Tensor) -> Tensor:
        """The models package's layer in float32, with the weights as they are stored."""
        if self.fc1.dtype == torch.uint8:
            return Moe(self.router, self.fc1, self.fc2, self.k, self.fc1_scale, self.fc2_scale)(
                u.float()
            )
        fc1, fc2 = self.fc1.float(), self.fc2.float()
        if self.fc1_scale is not None and self.fc2_scale is not None:
            fc1, fc2 = fc1 * self.fc1_scale[..., None], fc2 * self.fc2_scale[..., None]
        return Moe(self.router, fc1, fc2, self.k)(u.float())


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Of the whole, by norms; NaN if any value is."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def _in_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = weight.reshape(-1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = -low / scale
    q = (groups / scale + zero).round().clamp(0, 15).byte()
    return to_groups(q, scale, zero, tuple(weight.shape))


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(-1) / 448
    return (weight / scale[..., None]).to(torch.float8_e4m3fn), scale
