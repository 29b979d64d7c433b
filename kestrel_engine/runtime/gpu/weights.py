"""Packs weights that one GEMM of a decode step reads together into one tensor, without doubling memory.

A decoder block is parallel: its attention and its MLP read the same LayerNorm and add to the same residual stream. So
the weights of the input projections are stacked by rows, and those of the output projections by columns. The
checkpoint's names remain as views of the packed tensors, so `models.moondream.Moondream` also works on them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...models.weight_only import widened
from ...types.model_config import ModelConfig

PATCH_ALIGNMENT = 16
"""The patch embedding's columns are padded to a multiple of this number. The rows of a tensor core's operands must be
aligned to 16 bytes: 588 elements of two bytes are not, 592 are."""


def packed_in(layer: int) -> str:
    """Returns the name of a layer's packed input projections: qkv above fc1, or above the router in an MoE layer. There
    is none in an MoE layer whose qkv is in 4 bits.

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
        # The router is not in 4 bits, so it stays beside a qkv that is.
        if dense or not _are_narrow(tensors, inputs[:1]):
            _join_linears(tensors, joined, inputs, dim=0)
            _join(tensors, f"{joined}.bias", [f"{name}.bias" for name in inputs], dim=0)
        if dense:
            outputs = [f"{block}.attn.proj", f"{block}.mlp.fc2"]
            _join_linears(tensors, packed_out(layer), outputs, dim=1)
        else:
            _made_alike(tensors, [f"{block}.mlp.fc1", f"{block}.mlp.fc2"])
    if PADDED_PATCHES not in tensors:
        _pad_patches(tensors)
    return tensors


def _are_narrow(tensors: dict[str, Tensor], linears: list[str]) -> bool:
    """Returns whether all weights are in 4 bits, in groups of one size."""
    if any(tensors[f"{name}.weight"].dtype != torch.uint8 for name in linears):
        return False
    columns = (tensors[f"{name}.weight"].shape[-1] for name in linears)
    groups = (tensors[f"{name}.scale"].shape[-2] for name in linears)
    return len({k // count for k, count in zip(columns, groups, strict=True)}) == 1


def _join_linears(tensors: dict[str, Tensor], joined: str, linears: list[str], *, dim: int) -> None:
    """Joins weights, and their scales if all are in 4 bits."""
    leaves = ["weight", "scale"] if _made_alike(tensors, linears) else ["weight"]
    for leaf in leaves:
        _join(tensors, f"{joined}.{leaf}", [f"{name}.{leaf}" for name in linears], dim=dim)


def _made_alike(tensors: dict[str, Tensor], linears: list[str]) -> bool:
    """Returns whether all weights are in 4 bits. If only some are, or groups differ in size, it widens these."""
    if _are_narrow(tensors, linears):
        return True
    for name in linears:
        weight, scale = tensors[f"{name}.weight"], tensors.get(f"{name}.scale")
        if scale is not None and weight.dtype == torch.uint8:
            dtype = tensors["text.wte"].dtype
            flat = weight.view(-1, *weight.shape[-2:]), scale.view(-1, *scale.shape[-3:])
            wide = torch.stack([widened(w, s, dtype) for w, s in zip(*flat, strict=True)])
            tensors[f"{name}.weight"] = wide.view(*weight.shape[:-1], -1)
            del tensors[f"{name}.scale"]
    return False


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
