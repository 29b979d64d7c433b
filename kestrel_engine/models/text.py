"""The text decoder: parallel blocks with one LayerNorm, dense or mixture-of-experts MLPs, tau attention.

Works on a flat batch of tokens [num_tokens, dim]; knows no sequences, pages or sampling (moondream.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.model_config import TextConfig
from .attention import Attention
from .layers import LayerNorm, Linear, Mlp, Tensors, gelu_erf
from .rope import RotaryTable, Rotation


@dataclass(frozen=True, slots=True)
class Placement:
    """What a batch's positions mean to the blocks: rotary angles, and ln(p + 1) [num_tokens, 1] float32 for tau."""

    rotation: Rotation
    log_position: Tensor


@dataclass(frozen=True, slots=True)
class Tau:
    """Moondream 3's factors on queries and values, one per head, from content and position.

    ``weights`` [2 * heads, 3 * dim]: wq above wv. ``alpha`` [heads] float32.
    """

    weights: Tensor
    alpha: Tensor

    @classmethod
    def load(cls, tensors: Tensors, name: str) -> Tau:
        weights = torch.cat([tensors[f"{name}.wq"], tensors[f"{name}.wv"]])
        return cls(weights, tensors[f"{name}.alpha"].float())

    def factors(self, qkv: Tensor, log_position: Tensor) -> tuple[Tensor, Tensor]:
        """For ``qkv`` [num_tokens, 3 * dim]: the factors of q and of v, each [num_tokens, heads] float32."""
        content = torch.tanh(F.linear(gelu_erf(qkv), self.weights).float())
        place = 0.5 + torch.sigmoid(self.alpha * log_position)
        of_q, of_v = content.chunk(2, dim=-1)
        return of_q + place, of_v + place


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts: the chosen experts' outputs, weighted by a softmax over the chosen router logits.

    ``fc1`` [experts, 2 * inner, dim]: rows of h, then of g. ``fc2`` [experts, dim, inner]. Where they are float8_e4m3fn
    each row has a float32 scale, ``fc1_scale`` [experts, 2 * inner] and ``fc2_scale`` [experts, dim]: W = fp8 * scale.
    """

    router: Linear
    fc1: Tensor
    fc2: Tensor
    experts_per_token: int
    fc1_scale: Tensor | None = None
    fc2_scale: Tensor | None = None

    @classmethod
    def load(cls, tensors: Tensors, name: str, experts_per_token: int) -> Moe:
        return cls(
            Linear.load(tensors, f"{name}.router"),
            tensors[f"{name}.fc1.weight"],
            tensors[f"{name}.fc2.weight"],
            experts_per_token,
            tensors.get(f"{name}.fc1.scale"),
            tensors.get(f"{name}.fc2.scale"),
        )

    def __call__(self, u: Tensor) -> Tensor:
        """[num_tokens, dim] in and out. Tokens are grouped by expert, so only chosen experts' weights are read."""
        chosen_logits, chosen = self.router(u).topk(self.experts_per_token, dim=-1)
        weights = chosen_logits.float().softmax(dim=-1)
        if len(u) == 1:
            # Sorting one token's experts costs more than running small ones.
            outputs = torch.cat([self.expert(index, u) for index in chosen[0].tolist()])
            return (weights @ outputs.float()).to(u.dtype)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self.experts_per_token
        grouped = u[tokens]
        outputs = torch.empty_like(grouped)
        counts = torch.bincount(chosen.flatten(), minlength=self.fc1.shape[0]).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                end = begin + count
                outputs[begin:end] = self.expert(expert, grouped[begin:end])
                begin = end
        weighted = outputs.float() * weights.flatten()[by_expert, None]
        total = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
        return total.index_add_(0, tokens, weighted).to(u.dtype)

    def expert(self, index: int, u: Tensor) -> Tensor:
        """One expert's output for ``u`` [num_tokens, dim]."""
        fc1 = _dequantised(self.fc1, self.fc1_scale, index, u.dtype)
        fc2 = _dequantised(self.fc2, self.fc2_scale, index, u.dtype)
        h, g = F.linear(u, fc1).chunk(2, dim=-1)
        return F.linear(gelu_erf(h) * (g + 1), fc2)


def _dequantised(weight: Tensor, scale: Tensor | None, index: int, dtype: torch.dtype) -> Tensor:
    """One expert's weight [rows, columns], in the type of the computation."""
    if scale is None:
        return weight[index]
    return (weight[index].float() * scale[index].unsqueeze(-1)).to(dtype)


class TextBlock:
    """``x + attention(LN(x)) + mlp(LN(x))``."""

    def __init__(self, config: TextConfig, tensors: Tensors, index: int) -> None:
        name = f"text.blocks.{index}"
        self.index, self.n_heads = index, config.n_heads
        self.ln = LayerNorm.load(tensors, f"{name}.ln")
        self.qkv = Linear.load(tensors, f"{name}.attn.qkv")
        self.proj = Linear.load(tensors, f"{name}.attn.proj")
        self.tau = Tau.load(tensors, f"{name}.attn.tau") if config.tau_attn else None
        self.mlp: Callable[[Tensor], Tensor]
        if config.moe is not None and index >= config.moe.start_layer:
            self.mlp = Moe.load(tensors, f"{name}.mlp", config.moe.experts_per_token)
        else:
            self.mlp = Mlp.load(tensors, f"{name}.mlp")

    def __call__(self, x: Tensor, placement: Placement, attention: Attention) -> Tensor:
        u = self.ln(x)
        return x + self._attend(u, placement, attention) + self.mlp(u)

    def _attend(self, u: Tensor, placement: Placement, attention: Attention) -> Tensor:
        qkv = self.qkv(u)
        heads = qkv.view(u.shape[0], 3 * self.n_heads, -1)
        q, k, v = heads.chunk(3, dim=1)
        if self.tau is not None:
            of_q, of_v = self.tau.factors(qkv, placement.log_position)
            q.mul_(of_q.unsqueeze(-1))
            v.mul_(of_v.unsqueeze(-1))
        placement.rotation.apply_(heads[:, : 2 * self.n_heads])
        return self.proj(attention(self.index, q, k, v).flatten(1))


class TextModel:
    """Embedding, blocks, final LayerNorm and vocabulary head."""

    def __init__(self, config: TextConfig, tensors: Tensors) -> None:
        self.wte = tensors["text.wte"]
        self.blocks = [TextBlock(config, tensors, i) for i in range(config.n_layers)]
        self.post_ln = LayerNorm.load(tensors, "text.post_ln")
        self.lm_head = Linear.load(tensors, "text.lm_head")
        self._rotary = RotaryTable(
            config.rope_theta, config.rotary_dim, config.max_context, self.wte.device
        )

    def embed(self, ids: Tensor) -> Tensor:
        """[n] int64 -> [n, dim]."""
        return F.embedding(ids, self.wte)

    def place(self, positions: Tensor) -> Placement:
        """[num_tokens] int64, below the model's context."""
        return Placement(self._rotary.at(positions), positions.float().log1p().unsqueeze(-1))

    def __call__(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Embeddings [num_tokens, dim] -> residual stream after the last block, before ``post_ln``."""
        placement = self.place(positions)
        for block in self.blocks:
            x = block(x, placement, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Residual stream [n, dim] -> [n, vocab] float32."""
        return self.lm_head(self.post_ln(hidden)).float()
