"""Rotary position embedding: rotates dimension j of a head with dimension j + rotary_dim / 2 (moondream.md section 6).

The reference interleaves the rotated pairs. Queries and keys have the same order here, so the scores are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a batch of tokens: ``cos`` and ``sin`` [num_tokens, 1, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [num_tokens, num_heads, head_dim] with its first rotary_dim dimensions rotated, in float32.
        Without gradients, ``x`` itself is changed: a copy would take as long as the products."""
        half = self.cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        a, b = first.float(), second.float()
        c, d = a * self.cos - b * self.sin, a * self.sin + b * self.cos
        if torch.is_grad_enabled():
            return torch.cat([c.to(x.dtype), d.to(x.dtype), x[..., 2 * half :]], dim=-1)
        first.copy_(c)
        second.copy_(d)
        return x


class RotaryTable:
    """The cosines and sines of every position below ``max_positions``, computed once in float32."""

    def __init__(
        self, theta: float, rotary_dim: int, max_positions: int, device: torch.device
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]

    def at(self, positions: Tensor) -> Rotation:
        """Returns the rotation at ``positions`` [num_tokens] int64."""
        return Rotation(self._cos[positions], self._sin[positions])
