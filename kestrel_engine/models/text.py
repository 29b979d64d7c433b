"""The text decoder (moondream.md section 6): parallel blocks with one LayerNorm, dense or MoE MLPs, and tau attention.

It works on a flat batch of tokens [num_tokens, dim] and has no notion of sequences, pages or sampling. It permits
gradients, so adapters and the bundled models are trained with it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.adapter import INPUT
from ..types.model_config import TextConfig
from .attention import Attention
from .compiled.decode_attention import DecodeAttention
from .compiled.decode_step import DecodeStep, shape_of
from .compiled.few_rows import MOST_ROWS
from .layers import LayerNorm, Linear, Mlp, Tensors, gelu_erf
from .low_rank import TextAdapters
from .rope import RotaryTable, Rotation
from .weight_only import product


@dataclass(frozen=True, slots=True)
class Placement:
    """What blocks need to know about positions: the rotation, and ln(p + 1) [num_tokens, 1] float32 for tau."""

    rotation: Rotation
    log_position: Tensor

    @classmethod
    def at(cls, positions: Tensor, rotary: RotaryTable) -> Placement:
        """``positions``: [num_tokens] int64, below the model's context length."""
        return cls(rotary.at(positions), positions.float().log1p().unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class Tau:
    """Moondream 3's factors on queries and values, one for each head. ``weights``: [2 * heads, 3 * dim], wq above wv.
    ``alpha``: [heads] float32."""

    weights: Tensor
    alpha: Tensor

    @classmethod
    def load(cls, tensors: Tensors, name: str) -> Tau:
        weights = torch.cat([tensors[f"{name}.wq"], tensors[f"{name}.wv"]])
        return cls(weights, tensors[f"{name}.alpha"].float())

    def factors(self, qkv: Tensor, log_position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of q and of v for ``qkv`` [num_tokens, 3 * dim], each [num_tokens, heads] float32."""
        content = torch.tanh(F.linear(gelu_erf(qkv), self.weights).float())
        position_term = 0.5 + torch.sigmoid(self.alpha * log_position)
        q_content, v_content = content.chunk(2, dim=-1)
        return q_content + position_term, v_content + position_term


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts: the sum of the chosen experts' outputs, weighted by a softmax over their router logits.
    ``fc1``: [experts, 2 * inner, dim], the rows of h, then those of g. ``fc2``: [experts, dim, inner]. Both may be in 4
    or 8 bits, with the scales ``fc1_scale`` and ``fc2_scale`` (`weight_only`)."""

    router: Linear
    fc1: Tensor
    fc2: Tensor
    experts_per_token: int
    fc1_scale: Tensor | None = None
    fc2_scale: Tensor | None = None
    name: str = ""
    """The module's canonical name, by which adapters change it."""

    @classmethod
    def load(cls, tensors: Tensors, name: str, experts_per_token: int) -> Moe:
        return cls(
            Linear.load(tensors, f"{name}.router"),
            tensors[f"{name}.fc1.weight"],
            tensors[f"{name}.fc2.weight"],
            experts_per_token,
            tensors.get(f"{name}.fc1.scale"),
            tensors.get(f"{name}.fc2.scale"),
            name,
        )

    def __call__(self, u: Tensor, adapters: TextAdapters | None = None) -> Tensor:
        """Applies the experts to ``u`` [num_tokens, dim], in the same shape. Reads chosen experts' weights only."""
        chosen_logits, chosen = self.router(u).topk(self.experts_per_token, dim=-1)
        weights = chosen_logits.float().softmax(dim=-1)
        if len(u) == 1:
            # For one token, sorting the experts takes longer than running small experts.
            outputs = torch.cat([self.expert(index, u, adapters) for index in chosen[0].tolist()])
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
                own = None if adapters is None else adapters.of(tokens[begin:end])
                outputs[begin:end] = self.expert(expert, grouped[begin:end], own)
                begin = end
        weighted = outputs.float() * weights.flatten()[by_expert, None]
        total = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
        return total.index_add_(0, tokens, weighted).to(u.dtype)

    def expert(self, index: int, u: Tensor, adapters: TextAdapters | None = None) -> Tensor:
        """Returns one expert's output for ``u`` [num_tokens, dim]. ``adapters``: those of these tokens."""
        gated = _product(u, self.fc1, self.fc1_scale, index)
        if adapters is not None:
            adapters.add_expert_(f"{self.name}.fc1", index, u, gated)
        h, g = gated.chunk(2, dim=-1)
        inner = gelu_erf(h) * (g + 1)
        output = _product(inner, self.fc2, self.fc2_scale, index)
        if adapters is not None:
            adapters.add_expert_(f"{self.name}.fc2", index, inner, output)
        return output


def _product(x: Tensor, weights: Tensor, scales: Tensor | None, index: int) -> Tensor:
    """Returns ``x`` times the weight of one expert."""
    return product(x, weights[index], None if scales is None else scales[index], None)


class TextBlock:
    """A parallel block: ``x + attention(LN(x)) + mlp(LN(x))``."""

    def __init__(self, config: TextConfig, tensors: Tensors, index: int) -> None:
        name = f"text.blocks.{index}"
        self.index, self.n_heads = index, config.n_heads
        self.ln = LayerNorm.load(tensors, f"{name}.ln")
        # An expert is chosen by what attention adds, so rounding may change the choice.
        has_experts = config.moe is not None
        self.qkv = Linear.load(tensors, f"{name}.attn.qkv", keeps_rows=has_experts)
        self.proj = Linear.load(tensors, f"{name}.attn.proj")
        self.tau = Tau.load(tensors, f"{name}.attn.tau") if config.tau_attn else None
        self.mlp: Moe | Mlp
        if config.moe is not None and index >= config.moe.start_layer:
            self.mlp = Moe.load(tensors, f"{name}.mlp", config.moe.experts_per_token)
        else:
            self.mlp = Mlp.load(tensors, f"{name}.mlp")

    def __call__(
        self,
        x: Tensor,
        placement: Placement,
        attention: Attention,
        adapters: TextAdapters | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Returns the residual stream after the block, [num_tokens, dim]. ``kept``: the indices of the tokens whose
        result is needed, if those are not all; ``attention`` may return theirs only."""
        u = self.ln(x)
        attended = attention(self.index, *self._heads(u, placement, adapters)).flatten(1)
        if kept is not None:
            attended = attended if len(attended) == len(kept) else attended[kept]
            x, u = x[kept], u[kept]
        projected = self.proj(attended, adapters)
        if adapters is not None:
            adapters.add_(f"{self.proj.name}{INPUT}", u, projected)
        return x + projected + self.mlp(u, adapters)

    def _heads(
        self, u: Tensor, placement: Placement, adapters: TextAdapters | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [num_tokens, heads, head_dim]."""
        qkv = self.qkv(u, adapters)
        heads = qkv.view(u.shape[0], 3 * self.n_heads, -1)
        if self.tau is not None:
            q_factors, v_factors = self.tau.factors(qkv, placement.log_position)
            if torch.is_grad_enabled():
                factors = torch.cat([q_factors, torch.ones_like(q_factors), v_factors], dim=1)
                heads = (heads * factors.unsqueeze(-1)).to(qkv.dtype)
            else:
                heads[:, : self.n_heads].mul_(q_factors.unsqueeze(-1))
                heads[:, 2 * self.n_heads :].mul_(v_factors.unsqueeze(-1))
        q, k = placement.rotation(heads[:, : 2 * self.n_heads]).chunk(2, dim=1)
        return q, k, heads[:, 2 * self.n_heads :]


class TextModel:
    """The embedding, the blocks, the final LayerNorm and the vocabulary head."""

    def __init__(self, config: TextConfig, tensors: Tensors) -> None:
        self.wte = tensors["text.wte"]
        self.blocks = [TextBlock(config, tensors, i) for i in range(config.n_layers)]
        self.post_ln = LayerNorm.load(tensors, "text.post_ln")
        self.lm_head = Linear.load(tensors, "text.lm_head", keeps_rows=True)
        self._rotary = RotaryTable(
            config.rope_theta, config.rotary_dim, config.max_context, self.wte.device
        )
        self._rotary_dim = config.rotary_dim

    @cached_property
    def _decode_step(self) -> DecodeStep | None:
        shape = shape_of(self.blocks, self._rotary_dim)
        return None if shape is None else DecodeStep(self.blocks, shape)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeds token ids [n] int64 to [n, dim]."""
        return F.embedding(ids, self.wte)

    def place(self, positions: Tensor) -> Placement:
        """Returns the placement of ``positions`` [num_tokens] int64, which are below the model's context length."""
        return Placement.at(positions, self._rotary)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        attention: Attention,
        adapters: TextAdapters | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Returns the residual stream [num_tokens, dim] after the last block, before ``post_ln``. ``x``: embeddings
        [num_tokens, dim]. ``positions``: [num_tokens] int64. ``adapters``: those of the tokens; None if no token has
        one. ``kept``: the indices of the tokens whose result is returned; None for all."""
        placement = self.place(positions)
        if adapters is None and isinstance(attention, DecodeAttention):
            step = self._decode_step
            if step is not None and step.takes(x):
                x = step(x, placement.rotation, attention)
                return x if kept is None else x[kept]
        for block in self.blocks[:-1]:
            x = block(x, placement, attention, adapters)
        if kept is not None and (adapters is not None or len(kept) == len(x)):
            return self.blocks[-1](x, placement, attention, adapters)[kept]
        return self.blocks[-1](x, placement, attention, adapters, kept)

    @torch.inference_mode()
    def compile_decode(self, most_rows: int) -> None:
        """Compiles what decode passes of up to ``most_rows`` rows on a CPU need, if the blocks are one function there.
        Otherwise, the first pass of some rows waits for that while requests run."""
        if self._decode_step is None:
            return
        self._decode_step.compile(most_rows)
        for rows in range(1, min(most_rows, MOST_ROWS) + 1):
            self.logits(self.wte[:rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, vocab] float32 of ``hidden`` [n, dim], the residual stream before ``post_ln``."""
        return self.lm_head(self.post_ln(hidden)).float()
