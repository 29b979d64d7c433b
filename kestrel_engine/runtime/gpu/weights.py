"""Packs weights that one GEMM of a decode step reads together into one tensor, without doubling memory.

A decoder block is parallel: its attention and its MLP read the same LayerNorm and add to the same residual stream. So
the weights of the input projections are stacked by rows, and those of the output projections by columns. The
checkpoint's names remain as views of the packed tensors, so `models.moondream.Moondream` also works on them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...types.model_config import ModelConfig

PATCH_ALIGNMENT = 16
"""The patch embedding's columns are padded to a multiple of this number. The rows of a tensor core's operands must be
aligned to 16 bytes: 588 elements of two bytes are not, 592 are."""


def packed_in(layer: int) -> str:
    """Returns the name of a layer's packed input projections: qkv above fc1, or above the router in an MoE layer.

    ``.weight`` is [3 * dim + ff_dim, dim] or [3 * dim + experts, dim], and ``.bias`` has as many elements as rows.
    """
    return f"text.blocks.{layer}.packed_in"


def packed_out(layer: int) -> str:
    """Returns the name of a dense layer's packed output projections: ``.weight`` [dim, dim + ff_dim], proj left of
    fc2."""
    return f"text.blocks.{layer}.packed_out"


PADDED_PATCHES = "vision.patch_emb.padded"
"""The name of the padded patch embedding [enc_dim, padded columns], with zeros in the padding."""


def pack_weights(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the packed tensors to ``tensors``, replaces their parts by views, and returns ``tensors``.

    ``tensors``: a checkpoint, by canonical names without ``model.``. Layers are packed one after the other, so the peak
    is the size of the weights plus one layer. Only ``tensors`` should reference the parts, because other references
    keep them allocated. Packing twice has no effect.
    """
    for layer in range(config.text.n_layers):
        block, joined = f"text.blocks.{layer}", packed_in(layer)
        if f"{joined}.weight" in tensors:
            continue
        moe = config.text.moe
        dense = moe is None or layer < moe.start_layer
        inputs = [f"{block}.attn.qkv", f"{block}.mlp.fc1" if dense else f"{block}.mlp.router"]
        for leaf in ("weight", "bias"):
            _join(tensors, f"{joined}.{leaf}", [f"{name}.{leaf}" for name in inputs], dim=0)
        if dense:
            outputs = [f"{block}.attn.proj.weight", f"{block}.mlp.fc2.weight"]
            _join(tensors, f"{packed_out(layer)}.weight", outputs, dim=1)
    if PADDED_PATCHES not in tensors:
        _pad_patches(tensors)
    return tensors


def _join(tensors: dict[str, Tensor], joined: str, parts: list[str], *, dim: int) -> None:
    packed = torch.cat([tensors[name] for name in parts], dim=dim)
    sizes = [tensors[name].shape[dim] for name in parts]
    tensors[joined] = packed
    tensors.update(zip(parts, torch.split(packed, sizes, dim), strict=True))


def _pad_patches(tensors: dict[str, Tensor]) -> None:
    name = "vision.patch_emb.weight"
    weight = tensors[name]
    rows, columns = weight.shape
    padded = weight.new_zeros(rows, -(-columns // PATCH_ALIGNMENT) * PATCH_ALIGNMENT)
    padded[:, :columns] = weight
    tensors[PADDED_PATCHES], tensors[name] = padded, padded[:, :columns]


def running_sums(biases: Iterable[Tensor]) -> list[Tensor]:
    """Returns the float32 sums of the first 1, 2, ... of ``biases`` [dim].

    A residual GEMM of a fused pass adds no bias. Instead, each LayerNorm adds the sum of all biases so far while it
    reads the residual stream.
    """
    sums: list[Tensor] = []
    for bias in biases:
        sums.append(bias.float() + sums[-1] if sums else bias.float())
    return sums
