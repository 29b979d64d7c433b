"""Packs weights that one GEMM of a decode step reads together into one tensor, without doubling memory.

A block of the decoder is parallel: its attention and its MLP read the same LayerNorm and add to the same stream. So the
weights that read lie above each other, and those that write beside each other. The checkpoint's own names stay and
become views, so `models.moondream.Moondream` can be built over the packed tensors as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...types.model_config import ModelConfig

PATCH_ALIGNMENT = 16
"""Columns of the patch embedding are padded to a multiple of it: 588 elements of two bytes are not a whole number of
the 16 bytes that a tensor core's operand rows must be aligned to; 592 are."""


def packed_in(layer: int) -> str:
    """Name of ``.weight`` [3 * dim + ff, dim] and ``.bias``: qkv above fc1; of an MoE layer above the router."""
    return f"text.blocks.{layer}.packed_in"


def packed_out(layer: int) -> str:
    """Name of ``.weight`` [dim, dim + ff] of a dense layer: proj left of fc2."""
    return f"text.blocks.{layer}.packed_out"


PADDED_PATCHES = "vision.patch_emb.padded"
"""Name of the patch embedding [enc_dim, padded], zeros in the columns beyond a patch."""


def pack_weights(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the packed tensors to ``tensors`` (a checkpoint: canonical names without ``model.``), replaces their parts
    by views and returns it. One layer at a time: at its peak one layer's packed weights exist twice.

    Other holders of the parts keep them alive: nothing but ``tensors`` should. Packing twice changes nothing.
    """
    for layer in range(config.text.n_layers):
        block, joined = f"text.blocks.{layer}", packed_in(layer)
        if f"{joined}.weight" in tensors:
            continue
        moe = config.text.moe
        dense = moe is None or layer < moe.start_layer
        readers = [f"{block}.attn.qkv", f"{block}.mlp.fc1" if dense else f"{block}.mlp.router"]
        for leaf in ("weight", "bias"):
            _join(tensors, f"{joined}.{leaf}", [f"{name}.{leaf}" for name in readers], dim=0)
        if dense:
            writers = [f"{block}.attn.proj.weight", f"{block}.mlp.fc2.weight"]
            _join(tensors, f"{packed_out(layer)}.weight", writers, dim=1)
    if PADDED_PATCHES not in tensors:
        _pad_patches(tensors)
    return tensors


def _join(tensors: dict[str, Tensor], joined: str, parts: list[str], *, dim: int) -> None:
    whole = torch.cat([tensors[name] for name in parts], dim=dim)
    sizes = [tensors[name].shape[dim] for name in parts]
    tensors[joined] = whole
    tensors.update(zip(parts, torch.split(whole, sizes, dim), strict=True))


def _pad_patches(tensors: dict[str, Tensor]) -> None:
    name = "vision.patch_emb.weight"
    weight = tensors[name]
    rows, columns = weight.shape
    padded = weight.new_zeros(rows, -(-columns // PATCH_ALIGNMENT) * PATCH_ALIGNMENT)
    padded[:, :columns] = weight
    tensors[PADDED_PATCHES], tensors[name] = padded, padded[:, :columns]


def running_sums(biases: Iterable[Tensor]) -> list[Tensor]:
    """Float32 sums of the first 1, 2, ... of ``biases`` [dim].

    A residual GEMM of a fused pass adds no bias: what the biases so far would have added is added by each LayerNorm
    while it reads the stream.
    """
    sums: list[Tensor] = []
    for bias in biases:
        sums.append(bias.float() + sums[-1] if sums else bias.float())
    return sums
