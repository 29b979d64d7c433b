"""Muon: momentum whose matrices are orthogonalised by Newton-Schulz iterations, batched by shape."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from training.learning.model import Moondream

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(m: Tensor, steps: int = 5) -> Tensor:
    """Matrices [n, rows, columns] to nearly orthogonal ones, in bfloat16."""
    a, b, c = _COEFFICIENTS
    x: Tensor = m.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if tall else x


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """The 2-D weights (and stacked experts) of vision and text blocks; the router stays with AdamW."""
    wanted = (".attn.qkv.weight", ".attn.proj.weight", ".mlp.fc1.weight", ".mlp.fc2.weight")
    return ".blocks." in name and name.endswith(wanted) and parameter.ndim >= 2


class Muon:
    """For the block matrices of a model; qkv counts as three matrices, experts one by one."""

    def __init__(
        self, model: Moondream, lr: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self._groups: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for name, p in model.named_parameters():
            if is_block_matrix(name, p):
                count = 3 if ".qkv." in name else (p.shape[0] if p.ndim == 3 else 1)
                self._groups[p.numel() // count // p.shape[-1], p.shape[-1]].append((p, count))
        self._state: dict[nn.Parameter, Tensor] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self._groups.values() for p, _ in group]

    @torch.no_grad()
    def step(self) -> None:
        for (rows, columns), group in self._groups.items():
            gradients = [p.grad for p, _ in group if p.grad is not None]
            for p, _ in group:
                if p not in self._state:
                    self._state[p] = torch.zeros_like(p)
            states = [self._state[p] for p, _ in group]
            torch._foreach_lerp_(states, gradients, 1 - self.momentum)
            ahead = torch._foreach_lerp(gradients, states, self.momentum)
            stacked = torch.cat([u.view(-1, rows, columns) for u in ahead])
            update = orthogonalise(stacked).float()
            scale = self.lr * 0.2 * math.sqrt(max(rows, columns))
            parts = torch.split(update, [count for _, count in group])
            parameters: list[Tensor] = [p for p, _ in group]
            torch._foreach_mul_(parameters, 1 - self.lr * self.decay)
            updates = [u.reshape(p.shape) for u, p in zip(parts, parameters, strict=True)]
            torch._foreach_add_(parameters, updates, alpha=-scale)
