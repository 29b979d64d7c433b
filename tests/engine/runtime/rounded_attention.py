"""What an eight-bit cache is to compute: one sequence's attention in plain torch, with keys and values rounded."""

from collections.abc import Sequence

import torch
from torch import Tensor


class RoundedAttention:
    """`models.attention.Attention` of one whole sequence. Its first ``prefix`` positions, BOS and an image, see one
    another as computed; all others see rounded keys and values up to their own. ``saturated``: numbers cut off."""

    def __init__(self, scales: Sequence[tuple[float, float]], prefix: int) -> None:
        self.saturated = 0
        self._scales, self._prefix = scales, prefix

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_keys, of_values = self._scales[layer]
        rounded = self._rounded(k, of_keys), self._rounded(v, of_values)
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        prefix = self._prefix
        image = _attended(q[:prefix], k[:prefix], v[:prefix], seen.new_ones(prefix, prefix))
        return torch.cat([image, _attended(q, *rounded, seen)[prefix:]])

    def _rounded(self, x: Tensor, scale: float) -> Tensor:
        limited = (x.float() * (1 / scale)).clamp(-448, 448)
        self.saturated += int((x.abs() > 448 * scale).sum())
        return (limited.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
