"""How much memory a GpuRuntime takes beside weights and K/V pool, from shapes alone: before anything is allocated.

The largest passes count: pictures and prompts never run at once, so the larger of the two is what a step needs.
"""

from __future__ import annotations

import torch

from ...model_config import ModelConfig

PASS_POSITIONS = 12_288
"""Positions of one prefill pass: bounds its activations. 16 pictures; larger passes are no faster."""

FIXED_BYTES = 768 << 20
"""Workspaces of cuBLAS, cuDNN and FlashInfer, captured graphs, compiled kernels and staging buffers."""


def reserve_bytes(
    config: ModelConfig, dtype: torch.dtype, *, max_batch_size: int, max_crops: int
) -> int:
    """Bytes that passes of PASS_POSITIONS positions and ``max_crops`` crops need at their peak, with all that is kept
    from step to step."""
    passes = max(_vision(config, max_crops), _prefill(config)) * dtype.itemsize
    logits = 4 * max_batch_size * config.text.vocab_size * 4
    embeddings = 64 * config.image_positions * config.text.dim * dtype.itemsize
    return int((passes + logits + embeddings) * 1.1) + FIXED_BYTES


def _vision(config: ModelConfig, max_crops: int) -> int:
    """Elements: stream, its norm, queries, keys, values, attended, features kept, and the MLP's hidden layer."""
    vision = config.vision
    encoder = max_crops * vision.grid**2 * (8 * vision.enc_dim + vision.enc_ff_dim)
    projector = 16 * vision.grid**2 * (2 * vision.enc_dim + vision.proj_inner_dim)
    return max(encoder, projector) + max_crops * 3 * vision.crop_size**2


def _prefill(config: ModelConfig) -> int:
    text = config.text
    dense = PASS_POSITIONS * (7 * text.dim + text.ff_dim)
    if text.moe is None:
        return dense
    moe = text.moe
    pairs = PASS_POSITIONS * moe.experts_per_token + 128 * moe.num_experts
    experts = pairs * (moe.expert_inner_dim + text.dim)
    one_layer = moe.num_experts * 3 * moe.expert_inner_dim * text.dim
    return max(dense, PASS_POSITIONS * 7 * text.dim + experts) + one_layer
