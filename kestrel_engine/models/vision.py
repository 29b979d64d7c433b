"""The vision tower: encodes the crops of an image to one embedding [grid * grid, dim] (moondream.md sections 4 and 5).

A crop and the pooled image each have ``VisionConfig.grid`` patches a side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.model_config import VisionConfig
from .compiled import full_attention
from .layers import LayerNorm, Linear, Mlp, Tensors
from .low_rank import Adapters

CROPS_PER_PASS = 8
"""Crops of one pass through the tower on a GPU. Bounds the activations: about 30 MB a crop for a released model in
float32. On a CPU, each crop has a pass of its own, which is as fast. A product of matrices may round a row differently
if there are more rows, so only then the features of a crop do not depend on the crops beside it."""


class VisionBlock:
    """A pre-norm transformer block. Each patch attends to all patches of its crop."""

    def __init__(self, config: VisionConfig, tensors: Tensors, index: int) -> None:
        name = f"vision.blocks.{index}"
        self.n_heads = config.enc_n_heads
        self.ln1 = LayerNorm.load(tensors, f"{name}.ln1")
        self.qkv = Linear.load(tensors, f"{name}.attn.qkv")
        self.proj = Linear.load(tensors, f"{name}.attn.proj")
        self.ln2 = LayerNorm.load(tensors, f"{name}.ln2")
        self.mlp = Mlp.load(tensors, f"{name}.mlp")

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        """Applies the block to ``x`` [num_crops, patches, enc_dim], in the same shape."""
        crops, patch_count, dim = x.shape
        fused = self.qkv(self.ln1(x), adapters)
        heads = fused.view(crops, patch_count, 3, self.n_heads, dim // self.n_heads)
        x = x + self.proj(full_attention.attend(*heads.unbind(2)).flatten(2), adapters)
        return x + self.mlp(self.ln2(x), adapters)


class VisionModel:
    def __init__(self, config: VisionConfig, tensors: Tensors) -> None:
        self.config = config
        self.patch_emb = Linear.load(tensors, "vision.patch_emb")
        self.pos_emb = tensors["vision.pos_emb"]
        self.blocks = [VisionBlock(config, tensors, i) for i in range(config.enc_n_layers)]
        self.post_ln = LayerNorm.load(tensors, "vision.post_ln")
        self.projector = Mlp.load(tensors, "vision.proj_mlp")

    def encode_images(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Returns the embedding [grid * grid, proj_out_dim] of each image. ``images``: for each image its crops [n,
        crop_size, crop_size, 3] uint8 and its tiling (rows, columns). Of the two equal crops of a tiling of (1, 1),
        only one is encoded."""
        needed = [crops[: num_distinct(len(crops), tiling)] for crops, tiling in images]
        features = self.encode_crops(torch.cat(needed))
        pieces = torch.split(features, [len(crops) for crops in needed])
        return [self.embed(p, tiling) for p, (_, tiling) in zip(pieces, images, strict=True)]

    def embed(
        self, features: Tensor, tiling: tuple[int, int], adapters: Adapters | None = None
    ) -> Tensor:
        """Returns an image's embedding [grid * grid, proj_out_dim]. ``features``: [n, patches, enc_dim]."""
        return self.project(*self.overview_and_pooled(features, tiling), adapters)

    def overview_and_pooled(
        self, features: Tensor, tiling: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Returns what ``project`` reads of an image; ``features`` as in ``embed``."""
        local = features if tiling == (1, 1) else features[1:]
        return features[0], self.pool(self.stitch(local, tiling))

    def encode_crops(self, crops: Tensor, adapters: Adapters | None = None) -> Tensor:
        """Encodes ``crops`` [n, crop_size, crop_size, 3] uint8 on any device, all with the same adapter. Returns [n,
        patches, enc_dim], the output of the last LayerNorm. On a CPU, the result for a crop has the same bits whatever
        the other crops are."""
        depth = len(self.blocks)
        return torch.cat(
            [self.post_ln(self._until(some, depth, adapters)) for some in self._passes(crops)]
        )

    def encode_until(self, crops: Tensor, block: int) -> Tensor:
        """Returns what ``block``, counted from 0, reads of ``crops``: the residual stream [n, patches, enc_dim]."""
        return torch.cat([self._until(some, block, None) for some in self._passes(crops)])

    def _passes(self, crops: Tensor) -> list[Tensor]:
        size = 1 if self.patch_emb.weight.device.type == "cpu" else CROPS_PER_PASS
        return [crops[i : i + size] for i in range(0, len(crops), size)]

    def _until(self, crops: Tensor, block: int, adapters: Adapters | None) -> Tensor:
        x = self._embed_patches(crops)
        for each in self.blocks[:block]:
            x = each(x, adapters)
        return x

    def encode_two_depths(
        self, crops: Tensor, early: int, adapters: Adapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `encode_crops`, in one pass of at most `CROPS_PER_PASS`, with the residual stream after block ``early``,
        counted from 0, as a second result [n, patches, enc_dim]."""
        assert len(crops) <= CROPS_PER_PASS, len(crops)
        x = self._embed_patches(crops)
        for block in self.blocks[: early + 1]:
            x = block(x, adapters)
        stream = x
        for block in self.blocks[early + 1 :]:
            x = block(x, adapters)
        return self.post_ln(x), stream

    def _embed_patches(self, crops: Tensor) -> Tensor:
        weight = self.patch_emb.weight
        x = patches(crops.to(weight.device), self.config.enc_patch_size).to(weight.dtype)
        return self.patch_emb(x) + self.pos_emb

    def stitch(self, local: Tensor, tiling: tuple[int, int]) -> Tensor:
        """Joins the features of tiles [th * tw, patches, enc_dim] to one grid [rows, columns, enc_dim]. ``tiling``:
        (th, tw). Overlapping patches are cut off."""
        grid, margin = self.config.grid, self.config.overlap_margin
        th, tw = tiling
        assert local.shape[:2] == (th * tw, grid * grid), (tuple(local.shape), tiling, grid)
        tiles = local.view(th, tw, grid, grid, -1)
        rows = []
        for i in range(th):
            top, bottom = _contributed_range(i, th, grid, margin)
            row = []
            for j in range(tw):
                left, right = _contributed_range(j, tw, grid, margin)
                row.append(tiles[i, j, top:bottom, left:right])
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)

    def pool(self, stitched: Tensor) -> Tensor:
        """Averages ``stitched`` [rows, columns, enc_dim] to [grid * grid, enc_dim], in float32. On an axis of S cells,
        cell k of the output averages the input cells from floor(k S / grid) to ceil((k + 1) S / grid), exclusive.
        """
        grid = self.config.grid
        pooled = F.adaptive_avg_pool2d(stitched.float().permute(2, 0, 1), (grid, grid))
        return pooled.flatten(1).T.to(stitched.dtype)

    def project(self, overview: Tensor, pooled: Tensor, adapters: Adapters | None = None) -> Tensor:
        """Projects the features of the overview crop and the pooled features of the tiles, both [patches, enc_dim], to
        the image's embedding [patches, proj_out_dim]."""
        return self.projector(torch.cat([overview, pooled], dim=-1), adapters)


def num_distinct(num_crops: int, tiling: tuple[int, int]) -> int:
    """Returns how many crops have to be encoded. A single tile equals the overview crop and is not encoded again."""
    return 1 if tiling == (1, 1) else num_crops


def patches(crops: Tensor, size: int) -> Tensor:
    """Cuts ``crops`` [n, S, S, 3] uint8 into patches: [n, (S / size)^2, 3 * size^2] float32 in [-1, 1]. Within a patch,
    the order is channel, row, column."""
    n, side, _, channels = crops.shape
    cells = crops.view(n, side // size, size, side // size, size, channels)
    rows = cells.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * size * size)
    return (rows.float() / 255 - 0.5) / 0.5


def _contributed_range(index: int, count: int, grid: int, margin: int) -> tuple[int, int]:
    """Returns the range [first, end) of cells that tile ``index`` of ``count`` contributes along one axis."""
    return (0 if index == 0 else margin), (grid if index == count - 1 else grid - margin)
