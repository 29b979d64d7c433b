"""Muon: momentum whose matrices are orthogonalised by Newton-Schulz iterations, as in torch.optim.Muon.

torch takes one matrix after another: 96 of them launch two thousand kernels a step. Ours takes all of a shape at once.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_BLOCK_MATRICES = (".attn.qkv.weight", ".attn.proj.weight", ".mlp.fc1.weight", ".mlp.fc2.weight")


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


class Muon:
    """For the matrices of vision and text blocks among the named parameters; qkv counts as three matrices."""

    def __init__(
        self, named: Mapping[str, Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.names = {n for n in named if ".blocks." in n and n.endswith(_BLOCK_MATRICES)}
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for name in sorted(self.names):
            p = named[name]
            self._groups[p.shape[0] // (3 if ".qkv." in name else 1), p.shape[1]].append(p)
        self._states = {k: [torch.zeros_like(p) for p in g] for k, g in self._groups.items()}

    @torch.no_grad()
    def step(self) -> None:
        for (rows, columns), group in self._groups.items():
            gradients = [p.grad for p in group if p.grad is not None]
            states = self._states[rows, columns]
            torch._foreach_lerp_(states, gradients, 1 - self.momentum)
            ahead = torch._foreach_lerp(gradients, states, self.momentum)
            stacked = torch.cat([u.view(-1, rows, columns) for u in ahead])
            update = torch.split(orthogonalise(stacked).float(), [len(p) // rows for p in group])
            torch._foreach_mul_(group, 1 - self.lr * self.decay)
            updates = [u.reshape(p.shape) for u, p in zip(update, group, strict=True)]
            torch._foreach_add_(
                group, updates, alpha=-0.2 * self.lr * math.sqrt(max(rows, columns))
            )
