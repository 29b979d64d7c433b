"""Experts in FP8 with one float32 scale for each row: W[e, o, :] = float(weight[e, o, :]) * scale[e, o].

This is the released format (moondream.md section 2.4). The functions convert one expert at a time, so their peak memory
stays close to the size of the result.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
"""The largest value of float8_e4m3fn, which has no infinity."""


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns the real values of ``weight`` [experts, rows, columns] float8 with ``scale`` [experts, rows]. The result
    has the shape of ``weight``, in ``dtype`` on ``device``."""
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    wide = torch.empty(weight.shape[1:], dtype=torch.float32, device=device)
    scale = scale.to(device=device, dtype=torch.float32)
    for expert in range(weight.shape[0]):
        wide.copy_(weight[expert])
        out[expert].copy_(wide.mul_(scale[expert].unsqueeze(-1)))
    return out


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``weight`` [..., rows, columns] float32, which is overwritten, to float8_e4m3fn. Returns it and its scales
    [..., rows] float32. Each row uses the whole range: its largest magnitude becomes LARGEST."""
    scale = weight.abs().amax(dim=-1).div_(LARGEST)
    weight.div_(scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return weight.to(torch.float8_e4m3fn), scale
