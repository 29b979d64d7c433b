"""The minimum work of a model: the stored bytes that a decode step reads, and the FLOP of vision and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_engine.models.layers import LayerNorm, Linear, Mlp
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.text import Moe, TextBlock
from kestrel_engine.types.model_config import ModelConfig

SEQUENCES_A_PASS = 8
"""The sequences that are routed together, which bounds the activations."""


@dataclass(frozen=True)
class DecoderBytes:
    """The stored bytes of weights. ``dense``: those that every step reads. ``expert``: one expert of one layer.
    ``moe_layers``: the number of layers with ``num_experts`` experts each."""

    dense: int
    expert: int
    moe_layers: int
    num_experts: int
    experts_per_token: int
    kv_position: int

    def step(self, batch: int, positions: float, experts: float) -> float:
        """Returns the bytes that one step reads and the keys and values that it writes. ``positions``: the positions
        that each row attends to. ``experts``: the experts in use, as a mean of the MoE layers."""
        weights = self.dense + self.moe_layers * experts * self.expert
        return weights + batch * (positions + 1) * self.kv_position

    def expected_experts(self, batch: int) -> float:
        """Returns the experts that ``batch`` tokens would use if routers chose evenly and independently."""
        if not self.moe_layers:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** batch
        return self.num_experts * (1 - missed)


def decoder_bytes(model: Moondream, kv_dtype: torch.dtype, *, in_fp8: bool = False) -> DecoderBytes:
    """Returns the bytes of a model's weights, without the embedding table, of which a step reads one row a token.

    ``in_fp8``: steps read qkv, proj, fc1 and fc2 as FP8 copies, with a float32 scale for each row.
    """
    text, config = model.text, model.config.text

    def gemm(layer: Linear) -> int:
        if not in_fp8:
            return _bytes(*_linear(layer))
        scales = 4 * layer.weight.shape[0]
        return layer.weight.numel() + scales + (0 if layer.bias is None else _bytes(layer.bias))

    dense = _bytes(*_linear(text.lm_head), *_norm(text.post_ln))
    expert = moe_layers = 0
    for block in text.blocks:
        dense += _bytes(*_norm(block.ln)) + gemm(block.qkv) + gemm(block.proj)
        if block.tau is not None:
            dense += _bytes(block.tau.weights, block.tau.alpha)
        mlp = block.mlp
        if isinstance(mlp, Moe):
            dense += _bytes(*_linear(mlp.router))
            stored = [mlp.fc1, mlp.fc2, mlp.fc1_scale, mlp.fc2_scale]
            expert = _bytes(*(t for t in stored if t is not None)) // len(mlp.fc1)
            moe_layers += 1
        else:
            assert isinstance(mlp, Mlp), type(mlp)
            dense += gemm(mlp.fc1) + gemm(mlp.fc2)
    moe = config.moe
    return DecoderBytes(
        dense=dense,
        expert=expert,
        moe_layers=moe_layers,
        num_experts=moe.num_experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        kv_position=2 * config.n_layers * config.n_kv_heads * config.head_dim * kv_dtype.itemsize,
    )


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _linear(layer: Linear) -> list[Tensor]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def _norm(layer: LayerNorm) -> list[Tensor]:
    return [layer.weight, layer.bias]


@torch.inference_mode()
def chosen_experts(model: Moondream, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Returns the experts of each sequence's last token: [sequences, MoE layers, experts a token] int64 on the CPU.

    Plain torch computes them with the stored weights. ``sequences``: text ids, all of the same length.
    """
    assert len({len(ids) for ids in sequences}) == 1, "sequences of one length are needed"
    found = []
    for first in range(0, len(sequences), SEQUENCES_A_PASS):
        ids = torch.tensor([list(s) for s in sequences[first : first + SEQUENCES_A_PASS]])
        found.append(_route(model, ids.to(model.device)).cpu())
    return torch.cat(found)


def _route(model: Moondream, ids: Tensor) -> Tensor:
    count, length = ids.shape
    text = model.text
    x = text.embed(ids.flatten())
    placement = text.place(torch.arange(length, device=ids.device).repeat(count))
    last = torch.arange(count, device=ids.device) * length + length - 1

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = (t.view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*each, is_causal=True)
        return attended.transpose(1, 2).reshape(q.shape)

    chosen = []
    for block in text.blocks:
        if isinstance(block.mlp, Moe):
            chosen.append(_top(block, x[last]))
        x = block(x, placement, attention)
    return torch.stack(chosen, dim=1)


def _top(block: TextBlock, x: Tensor) -> Tensor:
    assert isinstance(block.mlp, Moe)
    return block.mlp.router(block.ln(x)).topk(block.mlp.experts_per_token, dim=-1).indices


def touched(chosen: Tensor) -> float:
    """Returns the number of different experts of a batch, as a mean of the layers. ``chosen``: see chosen_experts."""
    layers = chosen.transpose(0, 1).flatten(1)
    return sum(len(set(layer.tolist())) for layer in layers) / len(layers)


def vision_flop(config: ModelConfig, crops: int) -> float:
    """Returns the FLOP of the vision tower's patch embedding and blocks. A multiply-add counts as two."""
    vision = config.vision
    n, d = vision.grid**2, vision.enc_dim
    patch = vision.in_channels * vision.enc_patch_size**2
    block = 2 * n * (4 * d * d + 2 * d * vision.enc_ff_dim) + 4 * n * n * d
    return float(crops * (2 * n * patch * d + vision.enc_n_layers * block))


def prefix_flop(config: ModelConfig, images: int) -> float:
    """Returns the FLOP of the decoder's blocks for the image prefixes of ``images``, with attention in both
    directions."""
    text, n = config.text, config.image_prefix
    total = 0.0
    for layer in range(text.n_layers):
        total += 2 * n * 4 * text.dim**2 + 4 * n * n * text.dim
        if text.moe is not None and layer >= text.moe.start_layer:
            total += moe_flop(config, n)
        else:
            total += 2 * n * 2 * text.dim * text.ff_dim
        if text.tau_attn:
            total += 2 * n * 3 * text.dim * 2 * text.n_heads
    return images * total


def moe_flop(config: ModelConfig, tokens: int) -> float:
    """Returns the FLOP of one MoE layer's experts and router."""
    moe, dim = config.text.moe, config.text.dim
    assert moe is not None
    expert = 2 * 3 * dim * moe.expert_inner_dim
    return float(tokens * (moe.experts_per_token * expert + 2 * dim * moe.num_experts))
