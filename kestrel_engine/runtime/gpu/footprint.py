"""How much memory a GpuRuntime takes beside weights and K/V pool, from shapes alone: before anything is allocated.

The largest passes count: images and prompts never run at once, so the larger of the two is what a step needs.
"""

from __future__ import annotations

import torch

from ...types.model_config import ModelConfig

PASS_POSITIONS = 12_288
"""Positions of one prefill pass: bounds its activations. 16 images; larger passes are no faster."""

FP8_VISION, FP8_PREFILL = ("vision", "all"), ("prefill", "all")
"""Values of RuntimeConfig.fp8_gemms by which the tower and prefill compute in FP8."""

DEVICE_PIXELS = 16_000_000
"""Width times height of the largest image whose crops the device makes; the CPU makes those of larger ones."""

ARENA_BYTES = 160 << 20
"""Pixels, and what lies between the passes of their resizes, that are on the device at a time. The largest image's
pixels take 48 MB; between passes there is at most twice as much again."""

FIXED_BYTES = 768 << 20
"""Workspaces of cuBLAS, cuDNN and FlashInfer, captured graphs, compiled kernels and staging buffers."""


def reserve_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_batch_size: int,
    max_crops: int,
    fp8_gemms: str = "off",
) -> int:
    """Bytes that passes of PASS_POSITIONS positions and ``max_crops`` crops need at their peak, with all that is kept
    from step to step, weights in FP8 among it (``RuntimeConfig.fp8_gemms``)."""
    vision = _vision(config, max_crops, fp8=fp8_gemms in FP8_VISION)
    passes = max(vision, _prefill(config, fp8=fp8_gemms in FP8_PREFILL)) * dtype.itemsize
    logits = 4 * max_batch_size * config.text.vocab_size * 4
    embeddings = 64 * config.image_positions * config.text.dim * dtype.itemsize
    copies = fp8_weight_bytes(config, fp8_gemms)
    return int((passes + logits + embeddings) * 1.1) + copies + ARENA_BYTES + FIXED_BYTES


def fp8_weight_bytes(config: ModelConfig, fp8_gemms: str) -> int:
    """Of the weights that are there in FP8 as well, with a float32 scale for each row. The originals stay: decode steps
    read the decoder's, and both are what the model is compared by."""
    vision, text = config.vision, config.text
    total = 0
    if fp8_gemms in FP8_VISION:
        total += vision.enc_n_layers * _fp8_block(vision.enc_dim, vision.enc_ff_dim)
    if fp8_gemms in FP8_PREFILL:
        dense = text.n_layers if text.moe is None else text.moe.start_layer
        # proj is a part of the rows of fc2.
        total += dense * (_fp8_block(text.dim, text.ff_dim) + text.dim**2)
        total += (text.n_layers - dense) * _fp8_block(text.dim, 0)
    return total


def _fp8_block(dim: int, ff_dim: int) -> int:
    """qkv, and the MLP's two weights if it has them."""
    return 3 * dim * (dim + 4) + ff_dim * (dim + 4) + (dim * (ff_dim + 4) if ff_dim else 0)


def _vision(config: ModelConfig, max_crops: int, *, fp8: bool) -> int:
    """Elements: stream, its norm, queries, keys, values, attended, features kept, and the MLP's hidden layer; in FP8
    that layer's rows again and what the MLP gave."""
    vision = config.vision
    encoder = max_crops * vision.grid**2 * (8 * vision.enc_dim + vision.enc_ff_dim)
    if fp8:
        encoder += max_crops * vision.grid**2 * (vision.enc_dim + vision.enc_ff_dim // 2)
    projector = 16 * vision.grid**2 * (2 * vision.enc_dim + vision.proj_inner_dim)
    return max(encoder, projector) + max_crops * 3 * vision.crop_size**2


def _prefill(config: ModelConfig, *, fp8: bool) -> int:
    text = config.text
    dense = PASS_POSITIONS * (7 * text.dim + text.ff_dim)
    if fp8:
        dense += PASS_POSITIONS * (text.dim + (text.dim + text.ff_dim) // 2)
    if text.moe is None:
        return dense
    moe = text.moe
    stream = PASS_POSITIONS * 7 * text.dim
    pairs = PASS_POSITIONS * moe.experts_per_token + 128 * moe.num_experts
    experts = pairs * (moe.expert_inner_dim + text.dim)
    if fp8:
        # The norm in FP8 with its scales; of each pair the product, its scale and its row's, in float32.
        stream += PASS_POSITIONS * (text.dim // 2 + 2)
        experts += pairs * (moe.expert_inner_dim // 2 + 4)
    one_layer = moe.num_experts * 3 * moe.expert_inner_dim * text.dim
    return max(dense, stream + experts) + one_layer
