"""The decoder's weights in the layout of the fused passes: packed for combined GEMMs, with biases summed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....models.kv_format import UNSCALED, Scales
from ....models.layers import LayerNorm, Linear, Tensors
from ....models.rope import RotaryTable
from ....models.text import Moe, Tau
from ....models.weight_only import scale_of
from ....types.model_config import TextConfig
from ..gemm import Fp8Linear
from ..weights import packed_in, packed_out, running_sums


@dataclass(frozen=True, slots=True)
class TextLayer:
    """One block. A dense block has ``fc1`` and ``fc2``, an MoE block has ``moe``.

    ``reads``: [3 * dim + ff_dim, dim], qkv above fc1; in an MoE block, [3 * dim + experts, dim], qkv above the router.
    In an MoE block in 4 bits, it is qkv. ``writes``: [dim, dim + ff_dim], proj left of fc2; in an MoE block, proj
    alone. proj, fc2 and ``writes`` have no bias: ``output_bias``: [dim] float32, the biases that this block adds to the
    stream. ``pending``: [dim] float32, the biases of all earlier blocks; None in the first block. ``kv_scales``: the
    scales of the block's keys and values in the KV cache.
    """

    index: int
    ln: LayerNorm
    reads: Linear
    writes: Linear
    qkv: Linear
    proj: Linear
    fc1: Linear | None
    fc2: Linear | None
    moe: Moe | None
    tau: Tau | None
    output_bias: Tensor
    pending: Tensor | None
    kv_scales: Scales

    def has_experts(self) -> bool:
        return self.moe is not None


@dataclass(frozen=True, slots=True)
class Fp8Products:
    """The GEMMs of a block that are computed in FP8. The biases of proj and fc2 are added later.

    ``reads``: qkv above fc1, of which ``qkv`` and ``fc1`` are views; in an MoE block, qkv. ``writes``: proj left of fc2
    as one GEMM, which takes less time than proj alone in the model's dtype. In an MoE block, ``writes`` is proj if
    decode steps read it, and None otherwise: prefill computes proj in the model's dtype.
    """

    reads: Fp8Linear
    qkv: Fp8Linear
    fc1: Fp8Linear | None
    writes: Fp8Linear | None

    @classmethod
    def of(cls, layer: TextLayer, *, decode: bool = False) -> Fp8Products:
        """Rounds the weights of ``layer``. ``decode``: also those that only decode steps read.

        Raises ConfigError for shapes that do not support FP8.
        """
        if layer.fc1 is None:
            qkv = Fp8Linear.of(layer.qkv.weight, layer.qkv.bias)
            return cls(qkv, qkv, None, Fp8Linear.of(layer.proj.weight) if decode else None)
        reads = Fp8Linear.of(layer.reads.weight, layer.reads.bias)
        return cls(reads, *reads.split(len(layer.qkv.weight)), Fp8Linear.of(layer.writes.weight))


def load_layers(
    config: TextConfig, tensors: Tensors, kv_scales: Sequence[Scales] | None
) -> tuple[list[TextLayer], Tensor]:
    """Returns the blocks of a packed checkpoint, and the sum [dim] float32 of all their biases.

    ``kv_scales``: the scales of each layer for an FP8 KV cache.
    """
    output_bias = [
        _output_bias(tensors, f"text.blocks.{index}") for index in range(config.n_layers)
    ]
    sums = running_sums(output_bias)
    layers = []
    for index in range(config.n_layers):
        name = f"text.blocks.{index}"
        dense = config.moe is None or index < config.moe.start_layer
        proj, qkv = (
            _unbiased(tensors, f"{name}.attn.proj"),
            Linear.load(tensors, f"{name}.attn.qkv"),
        )
        joined = f"{packed_in(index)}.weight" in tensors
        layers.append(
            TextLayer(
                index=index,
                ln=LayerNorm.load(tensors, f"{name}.ln"),
                reads=Linear.load(tensors, packed_in(index)) if joined else qkv,
                writes=_unbiased(tensors, packed_out(index)) if dense else proj,
                qkv=qkv,
                proj=proj,
                fc1=Linear.load(tensors, f"{name}.mlp.fc1") if dense else None,
                fc2=_unbiased(tensors, f"{name}.mlp.fc2") if dense else None,
                moe=None if dense else _load_moe(config, tensors, name),
                tau=Tau.load(tensors, f"{name}.attn.tau") if config.tau_attn else None,
                output_bias=output_bias[index],
                pending=sums[index - 1] if index else None,
                kv_scales=UNSCALED if kv_scales is None else kv_scales[index],
            )
        )
    return layers, sums[-1]


def _unbiased(tensors: Tensors, name: str) -> Linear:
    weight = f"{name}.weight"
    return Linear(tensors[weight], name=name, scale=tensors.get(scale_of(weight)))


def _load_moe(config: TextConfig, tensors: Tensors, block: str) -> Moe:
    assert config.moe is not None
    return Moe.load(tensors, f"{block}.mlp", config.moe.experts_per_token)


def _output_bias(tensors: Tensors, block: str) -> Tensor:
    bias = tensors[f"{block}.attn.proj.bias"].float()
    # Experts have no biases.
    mlp_bias = tensors.get(f"{block}.mlp.fc2.bias")
    return bias if mlp_bias is None else bias + mlp_bias.float()


def rotary_angles(config: TextConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the cosines and the sines of every position, both [max_context, rotary_dim / 2] float32."""
    table = RotaryTable(config.rope_theta, config.rotary_dim, config.max_context, device)
    all_positions = table.at(torch.arange(config.max_context, device=device))
    return all_positions.cos.squeeze(1), all_positions.sin.squeeze(1)
