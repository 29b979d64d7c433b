"""Experts with random weights that preserve the scale of their inputs."""

import torch

from kestrel_engine.kernels.moe.tile import Experts


def random_experts(
    num_experts: int,
    dim: int,
    inner: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    fp8: bool = False,
) -> Experts:
    """Returns experts of ``dtype``, or in e4m3 with a scale for each row."""
    fc1 = torch.randn((num_experts, 2 * inner, dim), device=device, dtype=dtype)
    fc2 = torch.randn((num_experts, dim, inner), device=device, dtype=dtype)
    if not fp8:
        return Experts(fc1 * dim**-0.5, fc2 * inner**-0.5)
    return Experts(
        fc1.to(torch.float8_e4m3fn),
        fc2.to(torch.float8_e4m3fn),
        (torch.rand((num_experts, 2 * inner), device=device) + 0.5) * dim**-0.5,
        (torch.rand((num_experts, dim), device=device) + 0.5) * inner**-0.5,
    )
