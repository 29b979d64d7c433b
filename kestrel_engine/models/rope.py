"""Rotary position embedding: dimension j of a head turns with dimension j + rotary_dim / 2 (moondream.md section 6).

The reference stores rotated pairs interleaved; queries and keys being permuted alike, the scores are the same.
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

    def apply_(self, x: Tensor) -> None:
        """Rotates ``x`` [num_tokens, num_heads, head_dim] in place; computed in float32, other dimensions untouched."""
        half = self.cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        # Both products are complete before either half is overwritten.
        a, b = first.float(), second.float()
        turned = a * self.cos - b * self.sin
        second.copy_(a * self.sin + b * self.cos)
        first.copy_(turned)


class RotaryTable:
    """cos and sin of every position below ``max_positions``, computed once in float32."""

    def __init__(
        self, theta: float, rotary_dim: int, max_positions: int, device: torch.device
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]

    def at(self, positions: Tensor) -> Rotation:
        """``positions`` [num_tokens] int64."""
        return Rotation(self._cos[positions], self._sin[positions])
