"""The vision tower in few passes over memory: what `models.vision.VisionModel` computes, for many crops at a time.

The residual stream is touched by GEMMs that add to it and by LayerNorms that read it, by nothing else: the biases that
the GEMMs leave out are summed over the layers when the weights are there and added by each LayerNorm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.layer_norm import layer_norm
from ...kernels.patchify import patchify
from ...kernels.pool_tiles import pool_tiles
from ...model_config import VisionConfig
from ...models.layers import LayerNorm, Linear, Tensors
from .gemm import add_linear, linear, linear_gelu, require_exact
from .vision_attention import BATCHES, CropAttention
from .weights import PADDED_PATCHES, running_sums

MAX_CROPS = BATCHES[-1]
"""Crops that go through the tower together: bounds the activations (full size, two bytes: about 12 MB a crop)."""

MAX_PICTURES = 16
"""Pictures that go through the projector together (full size, two bytes: about 16 MB a picture)."""


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """``pending``: what LayerNorms 1 and 2 add to the stream, float32 [enc_dim]."""

    ln1: LayerNorm
    qkv: Linear
    proj: Tensor
    ln2: LayerNorm
    fc1: Linear
    fc2: Tensor
    pending: tuple[Tensor, Tensor]


class FusedVision:
    """``tensors``: a packed checkpoint (`weights.pack_weights`), in the type and on the device of the computation."""

    def __init__(self, config: VisionConfig, tensors: Tensors) -> None:
        self.config = config
        self._patch_weight = tensors[PADDED_PATCHES]
        require_exact(self._patch_weight.dtype)
        self._positions = tensors["vision.pos_emb"]
        names = [f"vision.blocks.{layer}" for layer in range(config.enc_n_layers)]
        leaves = ("attn.proj", "mlp.fc2")
        sums = running_sums(
            [
                tensors["vision.patch_emb.bias"],
                *(tensors[f"{name}.{leaf}.bias"] for name in names for leaf in leaves),
            ]
        )
        self.blocks = [
            VisionBlock(
                ln1=LayerNorm.load(tensors, f"{name}.ln1"),
                qkv=Linear.load(tensors, f"{name}.attn.qkv"),
                proj=tensors[f"{name}.attn.proj.weight"],
                ln2=LayerNorm.load(tensors, f"{name}.ln2"),
                fc1=Linear.load(tensors, f"{name}.mlp.fc1"),
                fc2=tensors[f"{name}.mlp.fc2.weight"],
                pending=(sums[2 * layer], sums[2 * layer + 1]),
            )
            for layer, name in enumerate(names)
        ]
        self._post_ln, self._post_pending = LayerNorm.load(tensors, "vision.post_ln"), sums[-1]
        self._fc1 = Linear.load(tensors, "vision.proj_mlp.fc1")
        self._fc2 = Linear.load(tensors, "vision.proj_mlp.fc2")
        weight = self._patch_weight
        head_dim = config.enc_dim // config.enc_n_heads
        self.attention = CropAttention(config.enc_n_heads, head_dim, weight.dtype, weight.device)

    @property
    def weight(self) -> Tensor:
        """A weight of the tower: its type and device are the computation's."""
        return self._patch_weight

    def encode_crops(self, crops: Tensor) -> Tensor:
        """[n, crop_size, crop_size, channels] uint8 on the model's device, n > 0 -> [n, patches, enc_dim], after the
        last LayerNorm."""
        config = self.config
        out = self._patch_weight.new_empty(len(crops), config.grid**2, config.enc_dim)
        # Passes of one size: few crops use the card worse than many.
        size = math.ceil(len(crops) / math.ceil(len(crops) / MAX_CROPS))
        with self.attention.chosen():
            for first in range(0, len(crops), size):
                last = min(first + size, len(crops))
                self.encode_pass(crops[first:last], out[first:last])
        return out

    def warm_up(self, max_crops: int = MAX_CROPS) -> None:
        """Runs every size of a pass for which attention makes a plan of its own. From the thread that will encode."""
        config = self.config
        largest = self.attention.padded(max_crops)
        shape = (largest, config.crop_size, config.crop_size, config.in_channels)
        crops = torch.randint(0, 255, shape, dtype=torch.uint8, device=self._patch_weight.device)
        for size in sorted({self.attention.padded(n) for n in range(1, max_crops + 1)}):
            self.encode_crops(crops[:size])

    def encode_pass(self, crops: Tensor, out: Tensor) -> None:
        """One pass of up to MAX_CROPS crops, as `encode_crops`, into ``out``; inside ``attention.chosen()``."""
        n, patches, dim = out.shape
        weight = self._patch_weight
        x = weight.new_empty(n, patches, dim)
        x.copy_(self._positions.expand_as(x))
        x = x.view(n * patches, dim)
        rows = patchify(crops, self.config.enc_patch_size, weight.shape[1], weight.dtype)
        add_linear(x, rows, weight)
        u = torch.empty_like(x)
        qkv = weight.new_empty(self.attention.padded(n) * patches, 3 * dim)
        if len(qkv) > len(x):
            # Never read, but numbers: some kernels are slow or loud about what is none.
            qkv[len(x) :].zero_()
        for block in self.blocks:
            layer_norm(x, block.ln1.weight, block.ln1.bias, pending=block.pending[0], out=u)
            linear(u, block.qkv, out=qkv[: len(x)])
            attended = self.attention(qkv.view(-1, patches, 3, self.config.enc_n_heads, self._size))
            add_linear(x, attended.view(-1, dim)[: len(x)], block.proj)
            layer_norm(x, block.ln2.weight, block.ln2.bias, pending=block.pending[1], out=u)
            add_linear(x, linear_gelu(u, block.fc1), block.fc2)
        layer_norm(
            x,
            self._post_ln.weight,
            self._post_ln.bias,
            pending=self._post_pending,
            out=out.view(-1, dim),
        )

    @property
    def _size(self) -> int:
        return self.config.enc_dim // self.config.enc_n_heads

    def embed_many(self, pictures: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Each picture is the features of its distinct crops [n, patches, enc_dim] and its tiling; returns the
        embedding [grid * grid, text dim] of each."""
        embeddings: list[Tensor] = []
        for first in range(0, len(pictures), MAX_PICTURES):
            embeddings += self._embed_pass(pictures[first : first + MAX_PICTURES])
        return embeddings

    def _embed_pass(self, pictures: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        grid, margin = self.config.grid, self.config.overlap_margin
        both = self._patch_weight.new_empty(len(pictures), grid * grid, 2 * self.config.enc_dim)
        for row, (features, tiling) in zip(both, pictures, strict=True):
            pool_tiles(features, tiling, grid, margin, out=row)
        embedded = linear(linear_gelu(both.flatten(0, 1), self._fc1), self._fc2)
        return list(embedded.view(len(pictures), grid * grid, -1))
