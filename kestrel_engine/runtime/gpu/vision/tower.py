"""The vision tower in few passes over memory. It computes the same as `models.vision.VisionModel`, for many crops.

Only GEMMs that add to the residual stream and LayerNorms that read it access the stream. The GEMMs omit their biases;
the biases are summed over the layers at startup, and each LayerNorm adds the sum.

With FP8, qkv, fc1 and fc2 have FP8 operands. The LayerNorms write FP8 rows, fc1 with its GELU writes the hidden layer
in FP8, and the next block's first LayerNorm adds the output of fc2. Attention and its projection, a twelfth of the
multiplications, keep the model's dtype: rounding the projection's input and adding its output would take the time that
an FP8 product gains.
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
"""The most crops of one pass. Bounds the activations: about 12 MB a crop for a released model with two-byte numbers."""

MAX_IMAGES = 16
"""The most images of one pass of the projector: about 16 MB an image for a released model with two-byte numbers."""


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """The weights of a block. ``pending``: the bias sums that LayerNorms 1 and 2 add, both [enc_dim] float32."""

    ln1: LayerNorm
    qkv: Linear
    proj: Tensor
    ln2: LayerNorm
    fc1: Linear
    fc2: Tensor
    pending: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """The GEMMs of a block with FP8 operands. A LayerNorm adds the bias of fc2."""

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
    """The vision tower. ``tensors``: a packed checkpoint (`weights.pack_weights`), in the dtype and on the device of
    the computation. ``fp8``: the blocks compute in FP8, with FP8 copies of their weights.

    Raises ConfigError for shapes that do not support FP8.
    """

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
        heads = config.enc_n_heads
        self.attention = CropAttention(config.grid**2, heads, head_dim, weight.dtype, weight.device)

    @property
    def weight(self) -> Tensor:
        """A weight of the tower, which has the dtype and the device of the computation."""
        return self._patch_weight

    def encode_crops(self, crops: Tensor) -> Tensor:
        """Encodes ``crops`` [n, crop_size, crop_size, channels] uint8 on the model's device, n > 0.

        Returns [n, patches, enc_dim], the output of the last LayerNorm.
        """
        config = self.config
        out = self._patch_weight.new_empty(len(crops), config.grid**2, config.enc_dim)
        # All passes have about the same size, because a pass with few crops uses the GPU poorly.
        size = math.ceil(len(crops) / math.ceil(len(crops) / MAX_CROPS))
        with self.attention.chosen():
            for first in range(0, len(crops), size):
                last = min(first + size, len(crops))
                self.encode_pass(crops[first:last], out[first:last])
        return out

    def warm_up(self, max_crops: int = MAX_CROPS) -> None:
        """Runs every size of a pass for which attention makes a separate plan. Call it on the thread that encodes."""
        config = self.config
        largest = self.attention.padded(max_crops)
        shape = (largest, config.crop_size, config.crop_size, config.in_channels)
        crops = torch.randint(0, 255, shape, dtype=torch.uint8, device=self._patch_weight.device)
        for size in sorted({self.attention.padded(n) for n in range(1, max_crops + 1)}):
            self.encode_crops(crops[:size])

    def encode_pass(self, crops: Tensor, out: Tensor) -> None:
        """Encodes up to MAX_CROPS crops into ``out``, as `encode_crops` does. Call it inside ``attention.chosen()``."""
        n, patches, dim = out.shape
        weight = self._patch_weight
        x = weight.new_empty(n, patches, dim)
        x.copy_(self._positions.expand_as(x))
        x = x.view(n * patches, dim)
        rows = patchify(crops, self.config.enc_patch_size, weight.shape[1], weight.dtype)
        add_linear(x, rows, weight)
        qkv = weight.new_empty(self.attention.padded(n) * patches, 3 * dim)
        if len(qkv) > len(x):
            # The padding is never read, but some kernels are slow or warn if it holds NaN.
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
        """Runs all blocks on the stream ``x`` [rows, enc_dim], in place. ``qkv`` has as many rows, or more."""
        u = torch.empty_like(x)
        for block in self.blocks:
            layer_norm(x, block.ln1.weight, block.ln1.bias, pending=block.pending[0], out=u)
            linear(u, block.qkv, out=qkv[: len(x)])
            add_linear(x, self._attend(qkv, patches)[: len(x)], block.proj)
            layer_norm(x, block.ln2.weight, block.ln2.bias, pending=block.pending[1], out=u)
            add_linear(x, linear_gelu(u, block.fc1), block.fc2)

    def _blocks_in_fp8(self, x: Tensor, qkv: Tensor, patches: int) -> None:
        """As `_blocks`, in FP8. The next LayerNorm, not the MLP's GEMM, adds the MLP's output to the stream."""
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
        """Returns the attention output [rows, enc_dim] of ``qkv`` [rows, 3 * enc_dim]."""
        heads, dim = self.config.enc_n_heads, self.config.enc_dim
        return self.attention(qkv.view(-1, patches, 3, heads, dim // heads)).view(-1, dim)

    def embed_many(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Returns the embedding [grid * grid, proj_out_dim] of each image.

        ``images``: for each image the features [n, patches, enc_dim] of its distinct crops, and its tiling.
        """
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
