"""Computes the memory that a GpuRuntime needs beside weights and KV cache, from shapes, before any allocation.

The largest pass determines the result. Images and prompts never run at the same time, so a step needs the larger of the
two.
"""

from __future__ import annotations

import torch

from ...types.model_config import ModelConfig

HIDDEN_ALIGNMENT = 128
"""In FP8, zeros make the hidden layer of the tower's MLPs a multiple of this number, which is as wide as the tiles."""

PASS_POSITIONS = 12_288
"""The most positions of one prefill pass, which bounds its activations. 16 images fit; larger passes are not faster."""

FP8_VISION, FP8_PREFILL, FP8_DECODE = ("vision", "all"), ("prefill", "all"), ("all",)
"""The values of RuntimeConfig.fp8_gemms with which the vision tower or prefill computes in FP8, or a decode step reads
weights in FP8."""

DEVICE_PIXELS = 16_000_000
"""Width times height of the largest image whose crops the device makes. The CPU makes the crops of larger images."""

ARENA_BYTES = 160 << 20
"""Bytes on the device for pixels and for the intermediate results of their resizes. The largest image takes 48 MB of
pixels, and its intermediate results take at most twice as much."""

SHRUNK_INPUTS, SHRUNK_BYTES = 1024, 512
"""The inputs of a layer whose products with the A of adapters are one sum, and the bytes of a row of these sums, as in
kernels.adapters.rows, which needs Triton."""

FIXED_BYTES = 192 << 20
"""Bytes for the workspaces of cuBLAS, cuDNN and FlashInfer, compiled kernels and staging buffers."""

CAPTURED_BLOCKS, CAPTURED_TEXT = 6, 256
"""The images and the other positions of the largest captured prefill pass, as in prefill.graphs, which needs Triton."""


def reserve_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_batch_size: int,
    max_crops: int,
    fp8_gemms: str = "off",
    adapters: bool = False,
    max_seq_length: int = PASS_POSITIONS,
    four_bits: bool = False,
    step_positions: int = PASS_POSITIONS,
) -> int:
    """Returns the peak bytes of passes over at most ``step_positions`` positions, in parts of up to PASS_POSITIONS, and
    ``max_crops`` crops, and of persistent buffers. ``adapters``: images may have adapters. ``four_bits``: the text
    decoder's weights are in 4 bits.

    The result includes the FP8 copies of weights for ``fp8_gemms`` (see RuntimeConfig).
    """
    vision = _vision(config, max_crops, fp8=fp8_gemms in FP8_VISION)
    positions = min(PASS_POSITIONS, max_batch_size * max_seq_length, step_positions)
    prefill = _prefill(config, positions, fp8=fp8_gemms in FP8_PREFILL, four_bits=four_bits)
    captured = min(CAPTURED_BLOCKS, max_batch_size) * config.image_prefix + CAPTURED_TEXT
    # The memory of captured passes is not given back to others. Only those of 4-bit models widen weights.
    prefill_graphs = _prefill(config, captured, fp8=False, four_bits=True)
    passes = (max(vision, prefill) + prefill_graphs) * dtype.itemsize
    logits = 4 * max_batch_size * config.text.vocab_size * 4
    images = min(64, 16 + 8 * max_batch_size)
    embeddings = images * config.image_positions * config.text.dim * dtype.itemsize
    shrunk = _shrunk(config, max_crops) if adapters else 0
    staying = staying_bytes(config, fp8_gemms, max_crops, dtype.itemsize)
    return int((passes + logits + embeddings) * 1.1) + shrunk + staying


def staying_bytes(config: ModelConfig, fp8_gemms: str, max_crops: int, itemsize: int) -> int:
    """Returns the part of ``reserve_bytes`` that a running model has taken. Its passes take the rest and give it
    back. ``itemsize``: the bytes of a number of activations."""
    graphs = _encoder(config, max_crops) * itemsize
    return fp8_weight_bytes(config, fp8_gemms) + graphs + ARENA_BYTES + FIXED_BYTES


def fp8_weight_bytes(config: ModelConfig, fp8_gemms: str) -> int:
    """Returns the bytes of the FP8 copies of weights, with a float32 scale for each row.

    The original weights stay in memory: passes with adapters and long steps read those of the decoder, and benchmarks
    compare with them.
    """
    vision, text = config.vision, config.text
    total = 0
    if fp8_gemms in FP8_VISION:
        # Where attention writes FP8, proj reads it.
        proj = vision.enc_dim * (vision.enc_dim + 4)
        hidden = vision.enc_ff_dim + -vision.enc_ff_dim % HIDDEN_ALIGNMENT
        total += vision.enc_n_layers * (_fp8_block(vision.enc_dim, hidden) + proj)
    if fp8_gemms in FP8_PREFILL:
        dense = text.n_layers if text.moe is None else text.moe.start_layer
        # The rows of proj are a part of the rows of fc2.
        total += dense * (_fp8_block(text.dim, text.ff_dim) + text.dim**2)
        total += (text.n_layers - dense) * _fp8_block(text.dim, 0)
        if fp8_gemms in FP8_DECODE:
            # Only decode steps read proj of the layers with experts in FP8.
            total += (text.n_layers - dense) * text.dim * (text.dim + 4)
    return total


def _fp8_block(dim: int, ff_dim: int) -> int:
    """Returns the FP8 bytes of qkv and, if ``ff_dim`` is not 0, of the MLP's two weights."""
    return 3 * dim * (dim + 4) + ff_dim * (dim + 4) + (dim * (ff_dim + 4) if ff_dim else 0)


def _encoder(config: ModelConfig, max_crops: int) -> int:
    """Returns the elements of a pass of the tower: its patches, stream, norm, queries, keys and values, and the MLP's
    hidden layer, which is larger than the attention's output."""
    vision = config.vision
    patches = vision.enc_patch_size**2 * vision.in_channels
    return max_crops * vision.grid**2 * (5 * vision.enc_dim + vision.enc_ff_dim + patches)


def _vision(config: ModelConfig, max_crops: int, *, fp8: bool) -> int:
    """Returns the elements of a vision pass: stream, norm, queries, keys, values, attention output, stored features and
    the MLP's hidden layer; in FP8 also that layer's FP8 rows and the MLP's output."""
    vision, encoder = config.vision, _encoder(config, max_crops)
    if fp8:
        encoder += max_crops * vision.grid**2 * (vision.enc_dim + vision.enc_ff_dim // 2)
    inner = 2 * vision.enc_dim + vision.proj_inner_dim + vision.proj_out_dim
    projector = min(16, max_crops) * vision.grid**2 * inner
    return max(encoder, projector) + max_crops * 3 * vision.crop_size**2


def _shrunk(config: ModelConfig, max_crops: int) -> int:
    """Returns the bytes of the products of a vision pass with the A of adapters, of the tower or of the projector."""
    vision = config.vision
    tower = max_crops * -(-max(vision.enc_dim, vision.enc_ff_dim) // SHRUNK_INPUTS)
    projector = 16 * -(-max(2 * vision.enc_dim, vision.proj_inner_dim) // SHRUNK_INPUTS)
    return max(tower, projector) * vision.grid**2 * SHRUNK_BYTES


def _prefill(config: ModelConfig, positions: int, *, fp8: bool, four_bits: bool) -> int:
    text = config.text
    dense = positions * (7 * text.dim + text.ff_dim)
    if four_bits:
        # One matrix is widened at a time.
        dense += text.dim * (text.dim + text.ff_dim)
    if fp8:
        dense += positions * (text.dim + (text.dim + text.ff_dim) // 2)
    if text.moe is None:
        return dense
    moe = text.moe
    stream = positions * 7 * text.dim
    pairs = positions * moe.experts_per_token + 128 * moe.num_experts
    experts = pairs * (moe.expert_inner_dim + text.dim)
    if fp8:
        # The FP8 norm and its scales. For each pair, the product, its scale and the scale of its row in float32.
        stream += positions * (text.dim // 2 + 2)
        experts += pairs * (moe.expert_inner_dim // 2 + 4)
    one_layer = 0 if four_bits else moe.num_experts * 3 * moe.expert_inner_dim * text.dim
    return max(dense, stream + experts) + one_layer
