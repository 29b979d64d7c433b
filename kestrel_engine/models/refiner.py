"""The segmentation refiner: sharpens a coarse mask with two depths of the vision tower (moondream.md section 9.6).

The network reads the features of one crop and a mask of it. It gives four candidate masks, and estimates the
intersection over union of each with the truth. `refine` applies it five times; the best candidate is the next mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import LAYER_NORM_EPS, LayerNorm, Linear, Tensors, gelu_erf

ITERATIONS = 5
NUM_MASKS = 4
NUM_BLOCKS = 2
NUM_HEADS = 8
"""Heads of all attentions but the last."""
NUM_LAST_HEADS = 4
SCALE = 8
"""Masks are computed at this many pixels a patch and side, then enlarged bilinearly to the crop."""

_Chain = Sequence[Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class RefinerConfig:
    """The sizes of a refiner, which follow from the shapes of its tensors.

    ``dim``: width of the tokens, 256 as released; a multiple of 32. ``enc_dim`` and ``grid``: width and patches a side
    of the vision tower. ``mlp_dim``: inner width of the blocks' MLPs.
    """

    dim: int
    enc_dim: int
    grid: int
    mlp_dim: int


def early_block(num_blocks: int) -> int:
    """Returns the index of the tower's block whose output the refiner reads: 8 of 27 blocks, as released.

    For other towers the choice is ours: the last block of the first third.
    """
    return max(num_blocks // 3 - 1, 0)


def refiner_shapes(config: RefinerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a refiner by its name in the released checkpoint."""
    dim, grid = config.dim, config.grid
    out: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = (rows, columns), (rows,)

    def norm(name: str, width: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = (width,), (width,)

    def conv(name: str, rows: int, columns: int, side: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = (rows, columns, side, side), (rows,)

    def attention(name: str, width: int) -> None:
        out[f"{name}.in_proj_weight"], out[f"{name}.in_proj_bias"] = (
            (3 * width, width),
            (3 * width,),
        )
        linear(f"{name}.out_proj", width, width)

    conv("image_proj", dim, config.enc_dim, 1)
    out["image_pe"] = (1, dim, grid, grid)
    out["mask_tokens"], out["iou_token"] = (NUM_MASKS, dim), (1, dim)
    out["output_pe"] = (NUM_MASKS + 1, dim)
    linear("hq_fusion.early_proj.0", dim, config.enc_dim)
    norm("hq_fusion.early_proj.1", dim)
    for index, (columns, side) in ((0, (2 * dim, 1)), (3, (dim, 3))):
        conv(f"hq_fusion.fusion.{index}", dim, columns, side)
        norm(f"hq_fusion.fusion.{index + 1}", dim)
    widths = (1, *_mask_widths(dim))
    for number in range(1, len(widths)):
        conv(f"mask_encoder.conv{number}.0", widths[number], widths[number - 1], 3)
        norm(f"mask_encoder.conv{number}.1", widths[number])
    for block in (f"transformer_blocks.{i}" for i in range(NUM_BLOCKS)):
        for name in ("output_self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token"):
            attention(f"{block}.{name}", dim)
        linear(f"{block}.mlp.0", config.mlp_dim, dim)
        linear(f"{block}.mlp.2", dim, config.mlp_dim)
        for number in range(1, 5):
            norm(f"{block}.norm{number}", dim)
    attention("final_token_to_image", dim)
    norm("final_norm", dim)
    for stage in range(3):
        width, first = dim >> (stage + 1), 6 * stage
        out[f"upsample.{first}.weight"] = (2 * width, width, 2, 2)
        out[f"upsample.{first}.bias"] = (width,)
        conv(f"upsample.{first + 3}", width, width, 3)
        for index in (first + 1, first + 4):
            norm(f"upsample.{index}.norm", width)
    last = dim // SCALE
    linear("final_q_proj", last, dim)
    norm("final_norm_up", last)
    attention("final_attn_up", last)
    for mask in range(NUM_MASKS):
        for index in (0, 2, 4):
            linear(f"mask_mlps.{mask}.{index}", last, last)
    for index, rows in ((0, dim), (2, dim), (4, NUM_MASKS)):
        linear(f"iou_head.{index}", rows, dim)
    return out


def num_parameters(config: RefinerConfig) -> int:
    """Returns the number of elements of all tensors."""
    return sum(prod(shape) for shape in refiner_shapes(config).values())


def _mask_widths(dim: int) -> tuple[int, int, int, int]:
    """Channels of the mask encoder's convolutions; 16, 32, 64, 256 as released."""
    return dim // 16, dim // 8, dim // 4, dim


@dataclass(frozen=True, slots=True)
class _Conv:
    weight: Tensor
    bias: Tensor
    stride: int = 1
    padding: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


@dataclass(frozen=True, slots=True)
class _Enlarge:
    """A transposed convolution that doubles height and width."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.weight, self.bias, stride=2)


@dataclass(frozen=True, slots=True)
class _GroupNorm:
    weight: Tensor
    bias: Tensor
    groups: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, slots=True)
class _ChannelNorm:
    """LayerNorm over the channels of [n, channels, height, width]."""

    norm: LayerNorm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention with projections as torch's MultiheadAttention stores them."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor
    out_proj: Linear
    heads: int

    @classmethod
    def load(cls, tensors: Tensors, name: str, heads: int) -> _Attention:
        return cls(
            tensors[f"{name}.in_proj_weight"],
            tensors[f"{name}.in_proj_bias"],
            Linear.load(tensors, f"{name}.out_proj"),
            heads,
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [n, m, dim]; ``key`` and ``value`` [n, k, dim]. Returns [n, m, dim]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class _Block:
    """Output tokens and image tokens attend to each other. Every part adds to its input, then normalises the sum."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        def attention(leaf: str) -> _Attention:
            return _Attention.load(tensors, f"{name}.{leaf}", NUM_HEADS)

        self._self = attention("output_self_attn")
        self._to_image = attention("cross_attn_token_to_image")
        self._to_tokens = attention("cross_attn_image_to_token")
        self._fc1 = Linear.load(tensors, f"{name}.mlp.0")
        self._fc2 = Linear.load(tensors, f"{name}.mlp.2")
        self._norms = [LayerNorm.load(tensors, f"{name}.norm{i}") for i in range(1, 5)]

    def __call__(
        self, tokens: Tensor, image: Tensor, tokens_pe: Tensor, image_pe: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``tokens`` [n, 5, dim] and ``image`` [n, patches, dim], both returned in the same shape. The positions
        ``…_pe`` are added to queries and keys, and not to values."""
        first, second, third, fourth = self._norms
        at = tokens + tokens_pe
        tokens = first(tokens + self._self(at, at, tokens))
        tokens = second(tokens + self._to_image(tokens + tokens_pe, image + image_pe, image))
        tokens = third(tokens + self._fc2(gelu_erf(self._fc1(tokens))))
        image = fourth(image + self._to_tokens(image + image_pe, tokens + tokens_pe, tokens))
        return tokens, image


class Refiner:
    """The mask head. ``tensors``: names and shapes of `refiner_shapes`, of one floating-point dtype on one device."""

    def __init__(self, config: RefinerConfig, tensors: Tensors) -> None:
        self.config = config
        dim = config.dim
        self._tensors = tensors

        def conv(name: str, **options: int) -> _Conv:
            return _Conv(tensors[f"{name}.weight"], tensors[f"{name}.bias"], **options)

        def group_norm(name: str, groups: int) -> _GroupNorm:
            return _GroupNorm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], groups)

        self._image_proj = conv("image_proj")
        self._early: _Chain = (
            Linear.load(tensors, "hq_fusion.early_proj.0"),
            LayerNorm.load(tensors, "hq_fusion.early_proj.1"),
            gelu_erf,
        )
        self._fusion: _Chain = (
            conv("hq_fusion.fusion.0"),
            group_norm("hq_fusion.fusion.1", dim // 8),
            gelu_erf,
            conv("hq_fusion.fusion.3", padding=1),
            group_norm("hq_fusion.fusion.4", dim // 8),
            gelu_erf,
        )
        groups = (1, dim // 32, dim // 16, dim // 8)
        self._mask_encoder: _Chain = [
            layer
            for number, count in enumerate(groups, start=1)
            for layer in (
                conv(f"mask_encoder.conv{number}.0", stride=2, padding=1),
                group_norm(f"mask_encoder.conv{number}.1", count),
                gelu_erf,
            )
        ]
        self._blocks = [_Block(tensors, f"transformer_blocks.{i}") for i in range(NUM_BLOCKS)]
        self._final = _Attention.load(tensors, "final_token_to_image", NUM_HEADS)
        self._final_norm = LayerNorm.load(tensors, "final_norm")
        self._upsample: list[Callable[[Tensor], Tensor]] = []
        for first in (0, 6, 12):
            enlarge = _Enlarge(
                tensors[f"upsample.{first}.weight"], tensors[f"upsample.{first}.bias"]
            )
            for layer, index in (
                (enlarge, first),
                (conv(f"upsample.{first + 3}", padding=1), first + 3),
            ):
                norm = _ChannelNorm(LayerNorm.load(tensors, f"upsample.{index + 1}.norm"))
                self._upsample += [layer, norm, gelu_erf]
        self._final_q = Linear.load(tensors, "final_q_proj")
        self._norm_up = LayerNorm.load(tensors, "final_norm_up")
        self._attend_up = _Attention.load(tensors, "final_attn_up", NUM_LAST_HEADS)
        self._mask_mlps = [_mlp(tensors, f"mask_mlps.{i}") for i in range(NUM_MASKS)]
        self._iou_head = _mlp(tensors, "iou_head")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the computation."""
        return self._image_proj.weight.dtype

    def image(self, final: Tensor, early: Tensor) -> Tensor:
        """Fuses the tower's features, both [n, patches, enc_dim]: the output of its last LayerNorm, and the residual
        stream after block `early_block`. Returns [n, dim, grid, grid], which is the same in all iterations."""
        projected = self._image_proj(self._as_grid(final))
        return _apply(
            self._fusion, torch.cat([self._as_grid(_apply(self._early, early)), projected], 1)
        )

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """``image``: from `image`. ``mask`` [n, side, side] in 0..1.

        Returns the logits of the candidates [n, 4, side, side], and their estimated IoUs [n, 4].
        """
        grid = self.config.grid
        tensors = self._tensors
        encoded = _apply(self._mask_encoder, mask.unsqueeze(1).to(self.dtype))
        features = image + _resize(encoded, grid)
        pixels = features.flatten(2).transpose(1, 2)
        image_pe = tensors["image_pe"].flatten(2).transpose(1, 2)
        tokens_pe = tensors["output_pe"]
        tokens = torch.cat([tensors["mask_tokens"], tensors["iou_token"]]).expand(
            len(image), -1, -1
        )
        for block in self._blocks:
            tokens, pixels = block(tokens, pixels, tokens_pe, image_pe)
        attended = self._final(tokens + tokens_pe, pixels + image_pe, pixels)
        tokens = self._final_norm(tokens + attended)
        up = _apply(self._upsample, self._as_grid(pixels))
        flat = up.flatten(2)
        queries = self._final_q(tokens[:, :NUM_MASKS])
        keys = flat.transpose(1, 2)
        queries = queries + self._attend_up(self._norm_up(queries), keys, keys)
        weights = torch.stack(
            [_apply(mlp, queries[:, i]) for i, mlp in enumerate(self._mask_mlps)], 1
        )
        logits = (weights @ flat).view(-1, NUM_MASKS, *up.shape[-2:])
        return _resize(logits, mask.shape[-1]), _apply(self._iou_head, tokens[:, NUM_MASKS])

    def refine(self, final: Tensor, early: Tensor, mask: Tensor) -> Tensor:
        """Applies the head `ITERATIONS` times. ``final``, ``early``: as for `image`. ``mask`` [n, side, side], 0 or 1.

        Returns the probabilities [n, side, side] float32 of the candidate with the best estimate in the last iteration.
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


def _mlp(tensors: Tensors, name: str) -> _Chain:
    first, second, third = (Linear.load(tensors, f"{name}.{i}") for i in (0, 2, 4))
    return first, gelu_erf, second, gelu_erf, third


def _apply(layers: _Chain, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _resize(x: Tensor, side: int) -> Tensor:
    """Bilinear, to a square of ``side``; pixels are areas, not points at the corners."""
    return F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
