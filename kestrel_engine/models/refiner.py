"""The segmentation refiner: sharpens a coarse mask with two depths of the vision tower (moondream.md section 9.6).

From the features of one crop and a mask of it, the network gives four candidate masks and estimates the intersection
over union of each with the truth. `refine` applies it five times; the best candidate is the next mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Tensors

ITERATIONS = 5
NUM_MASKS = 4
NUM_BLOCKS = 2
NUM_HEADS = 8
"""Heads of all attentions but the last."""
NUM_LAST_HEADS = 4
SCALE = 8
"""Masks are computed at this many pixels a patch and side, then enlarged bilinearly to the crop."""


@dataclass(frozen=True, slots=True)
class RefinerConfig:
    """``dim``: width of the tokens, 256 as released; a multiple of 32. ``enc_dim`` and ``grid``: width and patches a
    side of the vision tower. ``mlp_dim``: inner width of the blocks' MLPs."""

    dim: int
    enc_dim: int
    grid: int
    mlp_dim: int


def early_block(num_blocks: int) -> int:
    """The block of the tower whose output the refiner reads: 8 of 27, as released; else the last of the first third."""
    return max(num_blocks // 3 - 1, 0)


def refiner_shapes(config: RefinerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a refiner by its name in the released checkpoint."""
    return {name: tuple(each.shape) for name, each in Refiner(config).state_dict().items()}


class _ChannelNorm(nn.Module):
    """LayerNorm over the channels of [n, channels, height, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class _Attention(nn.Module):
    """Attention with projections as torch's MultiheadAttention stores them."""

    def __init__(self, width: int, heads: int = NUM_HEADS) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)
        self._heads = heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [n, m, dim]; ``key`` and ``value`` [n, k, dim]. Returns [n, m, dim]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], self._heads, -1).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return projected


class _Block(nn.Module):
    """Output tokens and image tokens attend to each other. Every part adds to its input, then normalises the sum."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.output_self_attn = _Attention(dim)
        self.cross_attn_token_to_image = _Attention(dim)
        self.cross_attn_image_to_token = _Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))

    def forward(
        self, tokens: Tensor, image: Tensor, tokens_pe: Tensor, image_pe: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``tokens`` [n, 5, dim] and ``image`` [n, patches, dim], both returned in the same shape. The positions
        ``…_pe`` are added to queries and keys, and not to values."""
        at = tokens + tokens_pe
        tokens = self.norm1(tokens + self.output_self_attn(at, at, tokens))
        at_image = image + image_pe
        looked = self.cross_attn_token_to_image(tokens + tokens_pe, at_image, image)
        tokens = self.norm2(tokens + looked)
        tokens = self.norm3(tokens + self.mlp(tokens))
        change = self.cross_attn_image_to_token(at_image, tokens + tokens_pe, tokens)
        return tokens, self.norm4(image + change)


class Refiner(nn.Module):
    """The mask head. Modules have the names of the released checkpoint. ``tensors``: names and shapes of
    `refiner_shapes`, of one floating-point dtype on one device; None for the shapes alone."""

    def __init__(self, config: RefinerConfig, tensors: Tensors | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self._define(config)
        self.requires_grad_(False)
        if tensors is not None:
            self.load_state_dict(dict(tensors), assign=True)

    def _define(self, config: RefinerConfig) -> None:
        dim, grid = config.dim, config.grid
        self.image_proj = nn.Conv2d(config.enc_dim, dim, 1)
        self.image_pe = nn.Parameter(torch.empty(1, dim, grid, grid))
        self.mask_tokens = nn.Parameter(torch.empty(NUM_MASKS, dim))
        self.iou_token = nn.Parameter(torch.empty(1, dim))
        self.output_pe = nn.Parameter(torch.empty(NUM_MASKS + 1, dim))
        self.hq_fusion = nn.ModuleDict(
            {
                "early_proj": nn.Sequential(
                    nn.Linear(config.enc_dim, dim), nn.LayerNorm(dim), nn.GELU()
                ),
                "fusion": nn.Sequential(
                    nn.Conv2d(2 * dim, dim, 1),
                    nn.GroupNorm(dim // 8, dim),
                    nn.GELU(),
                    nn.Conv2d(dim, dim, 3, padding=1),
                    nn.GroupNorm(dim // 8, dim),
                    nn.GELU(),
                ),
            }
        )
        self.mask_encoder = nn.Sequential()
        # Channels of the mask encoder's convolutions; 16, 32, 64, 256 as released.
        widths = (1, dim // 16, dim // 8, dim // 4, dim)
        for number, groups in enumerate((1, dim // 32, dim // 16, dim // 8)):
            before, width = widths[number : number + 2]
            layers = nn.Conv2d(before, width, 3, 2, 1), nn.GroupNorm(groups, width), nn.GELU()
            self.mask_encoder.add_module(f"conv{number + 1}", nn.Sequential(*layers))
        blocks = (_Block(dim, config.mlp_dim) for _ in range(NUM_BLOCKS))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.final_token_to_image = _Attention(dim)
        self.final_norm = nn.LayerNorm(dim)
        self.upsample = nn.Sequential()
        for width in (dim // 2, dim // 4, dim // 8):
            for layer in (
                nn.ConvTranspose2d(2 * width, width, 2, 2),
                nn.Conv2d(width, width, 3, padding=1),
            ):
                self.upsample.extend([layer, _ChannelNorm(width), nn.GELU()])
        last = dim // SCALE
        self.final_q_proj, self.final_norm_up = nn.Linear(dim, last), nn.LayerNorm(last)
        self.final_attn_up = _Attention(last, NUM_LAST_HEADS)
        self.mask_mlps = nn.ModuleList(_mlp(last, last) for _ in range(NUM_MASKS))
        self.iou_head = _mlp(dim, NUM_MASKS)

    @property
    def dtype(self) -> torch.dtype:
        return self.image_pe.dtype

    def image(self, final: Tensor, early: Tensor) -> Tensor:
        """Fuses the tower's features, both [n, patches, enc_dim]: the output of its last LayerNorm, and the residual
        stream after block `early_block`. Returns [n, dim, grid, grid], which is the same in all iterations."""
        projected = self.image_proj(self._as_grid(final))
        before = self._as_grid(self.hq_fusion["early_proj"](early))
        fused: Tensor = self.hq_fusion["fusion"](torch.cat([before, projected], 1))
        return fused

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """``image``: from `image`. ``mask`` [n, side, side] in 0..1. Returns the logits of the candidates [n, 4, side,
        side], and their estimated IoUs [n, 4]."""
        encoded = self.mask_encoder(mask.unsqueeze(1).to(self.dtype))
        features = image + _resize(encoded, self.config.grid)
        pixels = features.flatten(2).transpose(1, 2)
        image_pe, tokens_pe = self.image_pe.flatten(2).transpose(1, 2), self.output_pe
        tokens = torch.cat([self.mask_tokens, self.iou_token]).expand(len(image), -1, -1)
        for block in self.transformer_blocks:
            tokens, pixels = block(tokens, pixels, tokens_pe, image_pe)
        attended = self.final_token_to_image(tokens + tokens_pe, pixels + image_pe, pixels)
        tokens = self.final_norm(tokens + attended)
        up = self.upsample(self._as_grid(pixels))
        flat = up.flatten(2)
        queries = self.final_q_proj(tokens[:, :NUM_MASKS])
        keys = flat.transpose(1, 2)
        queries = queries + self.final_attn_up(self.final_norm_up(queries), keys, keys)
        weights = torch.stack([mlp(queries[:, i]) for i, mlp in enumerate(self.mask_mlps)], 1)
        logits = (weights @ flat).view(-1, NUM_MASKS, *up.shape[-2:])
        return _resize(logits, mask.shape[-1]), self.iou_head(tokens[:, NUM_MASKS])

    def refine(self, final: Tensor, early: Tensor, mask: Tensor) -> Tensor:
        """Applies the head `ITERATIONS` times. ``final``, ``early``: as for `image`. ``mask`` [n, side, side], 0 or 1.
        Returns the probabilities [n, side, side] float32 of the last iteration's candidate with the best estimate.
        """
        image = self.image(final, early)
        for _ in range(ITERATIONS):
            logits, ious = self(image, mask)
            best = ious.argmax(1)
            mask = logits[torch.arange(len(logits), device=logits.device), best].sigmoid()
        return mask.float()

    def _as_grid(self, tokens: Tensor) -> Tensor:
        """[n, patches, width] as [n, width, grid, grid]."""
        grid = self.config.grid
        return tokens.transpose(1, 2).reshape(len(tokens), -1, grid, grid)


def _mlp(width: int, out: int) -> nn.Sequential:
    layers = nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(width, out))


def _resize(x: Tensor, side: int) -> Tensor:
    """Bilinear, to a square of ``side``; pixels are areas, not points at the corners."""
    return F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
