"""The vision tower: crops of images in, one [grid * grid, dim] embedding per image out.

The sides of a crop and of the pooled image are ``VisionConfig.grid`` patches (moondream.md sections 4 and 5).
Decoding and tiling of images happen elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.model_config import VisionConfig
from .layers import LayerNorm, Linear, Mlp, Tensors

CROPS_PER_PASS = 8
"""Crops that go through the tower together: bounds the activations (full size, float32: about 30 MB a crop)."""


class VisionBlock:
    """Pre-norm transformer block over the patches of each crop, unmasked."""

    def __init__(self, config: VisionConfig, tensors: Tensors, index: int) -> None:
        name = f"vision.blocks.{index}"
        self.n_heads = config.enc_n_heads
        self.ln1 = LayerNorm.load(tensors, f"{name}.ln1")
        self.qkv = Linear.load(tensors, f"{name}.attn.qkv")
        self.proj = Linear.load(tensors, f"{name}.attn.proj")
        self.ln2 = LayerNorm.load(tensors, f"{name}.ln2")
        self.mlp = Mlp.load(tensors, f"{name}.mlp")

    def __call__(self, x: Tensor) -> Tensor:
        """[num_crops, patches, enc_dim] in and out."""
        crops, patch_count, dim = x.shape
        qkv = self.qkv(self.ln1(x)).view(crops, patch_count, 3, self.n_heads, dim // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class VisionModel:
    """Encoder, stitching, pooling and projector."""

    def __init__(self, config: VisionConfig, tensors: Tensors) -> None:
        self.config = config
        self.patch_emb = Linear.load(tensors, "vision.patch_emb")
        self.pos_emb = tensors["vision.pos_emb"]
        self.blocks = [VisionBlock(config, tensors, i) for i in range(config.enc_n_layers)]
        self.post_ln = LayerNorm.load(tensors, "vision.post_ln")
        self.projector = Mlp.load(tensors, "vision.proj_mlp")

    def encode_images(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Embeds images together; each is its crops [n, crop_size, crop_size, 3] uint8 and its tiling.

        A tiling of (1, 1) has two equal crops, the whole image twice; it is computed once. Returns one
        [grid * grid, proj_out_dim] per image.
        """
        needed = [crops[: num_distinct(len(crops), tiling)] for crops, tiling in images]
        features = self.encode_crops(torch.cat(needed))
        pieces = torch.split(features, [len(crops) for crops in needed])
        return [self.embed(p, tiling) for p, (_, tiling) in zip(pieces, images, strict=True)]

    def embed(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """Features of an image's distinct crops [n, patches, enc_dim] -> its embedding [grid * grid, text dim]."""
        local = features if tiling == (1, 1) else features[1:]
        return self.project(features[0], self.pool(self.stitch(local, tiling)))

    def encode_crops(self, crops: Tensor) -> Tensor:
        """[n, crop_size, crop_size, 3] uint8 on any device -> [n, patches, enc_dim], after the last LayerNorm."""
        passes = range(0, len(crops), CROPS_PER_PASS)
        return torch.cat([self._encode_pass(crops[i : i + CROPS_PER_PASS]) for i in passes])

    def _encode_pass(self, crops: Tensor) -> Tensor:
        weight = self.patch_emb.weight
        x = patches(crops.to(weight.device), self.config.enc_patch_size).to(weight.dtype)
        x = self.patch_emb(x) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        return self.post_ln(x)

    def stitch(self, local: Tensor, tiling: tuple[int, int]) -> Tensor:
        """Tiles' features [th * tw, patches, enc_dim] -> one [rows, columns, enc_dim] grid; overlaps are cut."""
        grid, margin = self.config.grid, self.config.overlap_margin
        th, tw = tiling
        assert local.shape[:2] == (th * tw, grid * grid), (tuple(local.shape), tiling, grid)
        tiles = local.view(th, tw, grid, grid, -1)
        rows = []
        for i in range(th):
            top, bottom = _kept(i, th, grid, margin)
            row = []
            for j in range(tw):
                left, right = _kept(j, tw, grid, margin)
                row.append(tiles[i, j, top:bottom, left:right])
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)

    def pool(self, stitched: Tensor) -> Tensor:
        """[rows, columns, enc_dim] -> [grid * grid, enc_dim]: output cell k averages inputs floor(k S / grid) up to
        ceil((k + 1) S / grid), on each axis; in float32."""
        grid = self.config.grid
        pooled = F.adaptive_avg_pool2d(stitched.float().permute(2, 0, 1), (grid, grid))
        return pooled.flatten(1).T.to(stitched.dtype)

    def project(self, whole: Tensor, pooled: Tensor) -> Tensor:
        """Features of the whole image beside those of its tiles, each [patches, enc_dim], to text embeddings."""
        return self.projector(torch.cat([whole, pooled], dim=-1))


def num_distinct(num_crops: int, tiling: tuple[int, int]) -> int:
    """Crops that have to be encoded: with one tile the tile equals the whole image, and once is enough."""
    return 1 if tiling == (1, 1) else num_crops


def patches(crops: Tensor, size: int) -> Tensor:
    """[n, S, S, 3] uint8 -> [n, (S / size)^2, 3 * size^2] float32 in [-1, 1]; in a patch: channel, row, column."""
    n, side, _, channels = crops.shape
    cells = crops.view(n, side // size, size, side // size, size, channels)
    rows = cells.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * size * size)
    return (rows.float() / 255 - 0.5) / 0.5


def _kept(index: int, count: int, grid: int, margin: int) -> tuple[int, int]:
    """First and one past the last cell that tile ``index`` of ``count`` contributes along one axis."""
    return (0 if index == 0 else margin), (grid if index == count - 1 else grid - margin)
