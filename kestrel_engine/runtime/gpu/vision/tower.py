"""The vision tower in few passes over memory: what `models.vision.VisionModel` computes, for many crops at a time.

The residual stream is touched by GEMMs that add to it and by LayerNorms that read it, by nothing else: the biases that
the GEMMs leave out are summed over the layers when the weights are there and added by each LayerNorm.

In FP8 (qkv, fc1 and fc2) the LayerNorms write FP8 rows, fc1 with its GELU writes the hidden layer in FP8, and what fc2
gives is added by the next block's first LayerNorm. Attention and its projection, a twelfth of the products, stay as
they are: rounding what the projection reads, and adding what it gives, takes what its product would gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.images.patchify import patchify
from ....kernels.images.pool_tiles import pool_tiles
from ....kernels.layer_norm import layer_norm
from ....kernels.linear.fp8_rows import layer_norm_fp8
from ....models.layers import LayerNorm, Linear, Tensors
from ....types.model_config import VisionConfig
from ..attention.patches import BATCHES, CropAttention
from ..gemm import Fp8Gelu, Fp8Linear, add_linear, linear, linear_gelu, require_exact
from ..weights import PADDED_PATCHES, running_sums

MAX_CROPS = BATCHES[-1]
"""Crops that go through the tower together: bounds the activations (full size, two bytes: about 12 MB a crop)."""

MAX_IMAGES = 16
"""Images that go through the projector together (full size, two bytes: about 16 MB an image)."""


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


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """The products of a block that are computed in FP8; the bias of fc2 is pending."""

    qkv: Fp8Linear
    fc1: Fp8Gelu
    fc2: Fp8Linear

    @classmethod
    def of(cls, block: VisionBlock) -> Fp8Block:
        assert block.fc1.bias is not None
        return cls(
            Fp8Linear.of(block.qkv.weight, block.qkv.bias),
            Fp8Gelu.of(block.fc1.weight, block.fc1.bias),
            Fp8Linear.of(block.fc2),
        )


class FusedVision:
    """``tensors``: a packed checkpoint (`weights.pack_weights`), in the type and on the device of the computation.
    ``fp8``: the blocks compute in FP8, of copies of their weights. Raises ConfigError for shapes that can't."""

    def __init__(self, config: VisionConfig, tensors: Tensors, *, fp8: bool = False) -> None:
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
        self.fp8 = fp8
        self._fp8_blocks = [Fp8Block.of(block) for block in self.blocks] if fp8 else []
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
        qkv = weight.new_empty(self.attention.padded(n) * patches, 3 * dim)
        if len(qkv) > len(x):
            # Never read, but numbers: some kernels are slow or loud about what is none.
            qkv[len(x) :].zero_()
        if self._fp8_blocks:
            self._blocks_in_fp8(x, qkv, patches)
        else:
            self._blocks(x, qkv, patches)
        layer_norm(
            x,
            self._post_ln.weight,
            self._post_ln.bias,
            pending=self._post_pending,
            out=out.view(-1, dim),
        )

    def _blocks(self, x: Tensor, qkv: Tensor, patches: int) -> None:
        """All of them, on the stream ``x`` [rows, enc_dim], which is changed; ``qkv`` has as many rows or more."""
        u = torch.empty_like(x)
        for block in self.blocks:
            layer_norm(x, block.ln1.weight, block.ln1.bias, pending=block.pending[0], out=u)
            linear(u, block.qkv, out=qkv[: len(x)])
            add_linear(x, self._attend(qkv, patches)[: len(x)], block.proj)
            layer_norm(x, block.ln2.weight, block.ln2.bias, pending=block.pending[1], out=u)
            add_linear(x, linear_gelu(u, block.fc1), block.fc2)

    def _blocks_in_fp8(self, x: Tensor, qkv: Tensor, patches: int) -> None:
        """The same; here no GEMM of the MLP adds to the stream."""
        from_mlp: Tensor | None = None
        wanted = self._fp8_blocks[0].fc1.wants_norms
        norms = self._post_pending.new_empty(len(x)) if wanted else None
        for block, fp8 in zip(self.blocks, self._fp8_blocks, strict=True):
            ln, pending = block.ln1, block.pending[0]
            u = layer_norm_fp8(x, ln.weight, ln.bias, pending=pending, add=from_mlp)
            fp8.qkv(u, out=qkv[: len(x)])
            add_linear(x, self._attend(qkv, patches)[: len(x)], block.proj)
            ln, pending = block.ln2, block.pending[1]
            u = layer_norm_fp8(x, ln.weight, ln.bias, pending=pending, norms=norms)
            from_mlp = fp8.fc2(fp8.fc1(u, norms))
        if from_mlp is not None:
            x.add_(from_mlp)

    def _attend(self, qkv: Tensor, patches: int) -> Tensor:
        """[rows, 3 * enc_dim] -> [rows, enc_dim]."""
        heads, dim = self.config.enc_n_heads, self.config.enc_dim
        return self.attention(qkv.view(-1, patches, 3, heads, dim // heads)).view(-1, dim)

    def embed_many(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Each image is the features of its distinct crops [n, patches, enc_dim] and its tiling; returns the
        embedding [grid * grid, text dim] of each."""
        embeddings: list[Tensor] = []
        for first in range(0, len(images), MAX_IMAGES):
            embeddings += self._embed_pass(images[first : first + MAX_IMAGES])
        return embeddings

    def _embed_pass(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        grid, margin = self.config.grid, self.config.overlap_margin
        both = self._patch_weight.new_empty(len(images), grid * grid, 2 * self.config.enc_dim)
        for row, (features, tiling) in zip(both, images, strict=True):
            pool_tiles(features, tiling, grid, margin, out=row)
        embedded = linear(linear_gelu(both.flatten(0, 1), self._fc1), self._fc2)
        return list(embedded.view(len(images), grid * grid, -1))
