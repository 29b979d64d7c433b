"""The vision tower in few passes over memory. It computes the same as `models.vision.VisionModel`, for many crops.

Only GEMMs that add to the residual stream and LayerNorms that read it access the stream. The GEMMs omit their biases;
the biases are summed over the layers at startup, and each LayerNorm adds the sum.

With FP8, qkv, fc1 and fc2 have FP8 operands. The LayerNorms write FP8 rows, and fc1 with its GELU writes the hidden
layer in FP8. On Hopper, attention writes FP8 for proj, too, and proj and fc2 add to the stream in their epilogues.
Elsewhere, and for few crops, the next LayerNorm adds their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.images.patchify import patchify
from ....kernels.images.pool_tiles import pool_tiles
from ....kernels.layer_norm import layer_norm
from ....kernels.linear.fp8_rows import FP8, Fp8Rows, layer_norm_fp8
from ....models.layers import LayerNorm, Linear, Tensors
from ....types.adapter import Adapter
from ....types.model_config import VisionConfig
from ..adapters.layout import SlabLayout
from ..attention.patches import BATCHES, CropAttention
from ..capture import rehearsed
from ..footprint import HIDDEN_ALIGNMENT
from ..gemm import Fp8Gelu, Fp8Linear, add_linear, linear, linear_gelu, require_exact
from ..weights import PADDED_PATCHES, running_sums
from .changes import BlockChanges, VisionChanges, changing_projector, changing_tower
from .fp8_values import in_units

MAX_CROPS = BATCHES[-1]
"""The most crops of one pass. Bounds the activations: about 12 MB a crop for a released model with two-byte numbers."""

MAX_IMAGES = 16
"""The most images of one pass of the projector: about 16 MB an image for a released model with two-byte numbers."""


@dataclass(frozen=True, slots=True)
class FusedBlock:
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
    """The GEMMs of a block with FP8 operands. A LayerNorm adds the biases of proj and fc2. ``proj``: None if attention
    writes no FP8."""

    qkv: Fp8Linear
    proj: Fp8Linear | None
    fc1: Fp8Gelu
    fc2: Fp8Linear

    @classmethod
    def of(cls, block: FusedBlock, *, attends: bool) -> Fp8Block:
        """``attends``: attention writes FP8."""
        if attends:
            qkv, proj = in_units(block.qkv, block.ln1, block.proj)
        else:
            qkv, proj = Fp8Linear.of(block.qkv.weight, block.qkv.bias), None
        assert block.fc1.bias is not None
        # Hidden rows of a multiple of 128 bytes. Others cross a line of the cache in each tile that a GEMM reads.
        more = -len(block.fc1.weight) % HIDDEN_ALIGNMENT
        fc1 = Fp8Gelu.of(F.pad(block.fc1.weight, (0, 0, 0, more)), F.pad(block.fc1.bias, (0, more)))
        return cls(qkv, proj, fc1, Fp8Linear.of(F.pad(block.fc2, (0, more))))


def even_size(count: int, limit: int) -> int:
    """Returns the size of passes over ``count`` crops, at most ``limit`` in each. All passes have about the same size,
    because a pass with few crops uses the GPU poorly."""
    return math.ceil(count / math.ceil(count / limit))


class FusedVision:
    """The vision tower. ``tensors``: a packed checkpoint (`weights.pack_weights`), in the dtype and on the device of
    the computation. ``fp8``: the blocks compute in FP8, with FP8 copies of their weights. ``adapters``: the layout of
    adapters' slabs and the anchor of these; None if images have no adapters. ``most_images``: those of one pass of the
    projector, at most MAX_IMAGES.

    Raises ConfigError for shapes that do not support FP8.
    """

    def __init__(
        self,
        config: VisionConfig,
        tensors: Tensors,
        *,
        fp8: bool = False,
        adapters: tuple[SlabLayout, Tensor] | None = None,
        most_images: int = MAX_IMAGES,
    ) -> None:
        self.config, self._most_images = config, most_images
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
            FusedBlock(
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
        self._post_ln, self._post_pending = LayerNorm.load(tensors, "vision.post_ln"), sums[-1]
        self._fc1 = Linear.load(tensors, "vision.proj_mlp.fc1")
        self._fc2 = Linear.load(tensors, "vision.proj_mlp.fc2")
        weight = self._patch_weight
        head_dim = config.enc_dim // config.enc_n_heads
        heads = config.enc_n_heads
        self.attention = CropAttention(config.grid**2, heads, head_dim, weight.dtype, weight.device)
        attends = fp8 and self.attention.writes_fp8
        self._fp8_blocks = (
            [Fp8Block.of(block, attends=attends) for block in self.blocks] if fp8 else []
        )
        # The scales of attention's rows in FP8.
        self._ones = weight.new_ones((MAX_CROPS * config.grid**2, 1), dtype=torch.float32)
        self.changes: VisionChanges | None = None
        """None if images have no adapters."""
        if adapters is not None:
            self.changes = VisionChanges(
                *adapters, max_crops=MAX_CROPS, max_images=MAX_IMAGES, patches=config.grid**2
            )

    @property
    def weight(self) -> Tensor:
        """A weight of the tower, which has the dtype and the device of the computation."""
        return self._patch_weight

    def encode_crops(
        self,
        crops: Tensor,
        adapters: Sequence[Adapter | None] = (),
        *,
        leave_room: bool = False,
    ) -> Tensor:
        """Encodes ``crops`` [n, crop_size, crop_size, channels] uint8 on the model's device, n > 0. ``adapters``: those
        of the crops; empty if no crop has one. ``leave_room`` has no effect without graphs.

        Returns [n, patches, enc_dim], the output of the last LayerNorm.
        """
        config = self.config
        out = self._patch_weight.new_empty(len(crops), config.grid**2, config.enc_dim)
        size = even_size(len(crops), MAX_CROPS)
        with self.attention.chosen():
            for first in range(0, len(crops), size):
                last = min(first + size, len(crops))
                adapted = self.send_adapters(adapters[first:last], last - first)
                self.encode_pass(crops[first:last], out[first:last], adapted=adapted)
        return out

    def send_adapters(self, adapters: Sequence[Adapter | None], padded: int) -> bool:
        """Returns whether an adapter of a pass's crops changes the tower. If one does, enqueues the copy of where the
        adapters are. ``padded``: the crops of the pass, padding included."""
        if not changing_tower(adapters):
            return False
        assert self.changes is not None, "this runtime computes no adapters"
        self.changes.send_crops(adapters, padded)
        return True

    def warm_up(self, max_crops: int = MAX_CROPS) -> None:
        """Runs every size of a pass for which attention makes a separate plan. Call it on the thread that encodes."""
        config = self.config
        largest = self.attention.padded(max_crops)
        shape = (largest, config.crop_size, config.crop_size, config.in_channels)
        crops = torch.randint(0, 255, shape, dtype=torch.uint8, device=self._patch_weight.device)
        for size in sorted({self.attention.padded(n) for n in range(1, max_crops + 1)}):
            self.encode_crops(crops[:size])
        if self.changes is not None:
            self.changes.send_crops((), 1)
            out = self._patch_weight.new_empty(1, config.grid**2, config.enc_dim)
            with self.attention.chosen():
                self.encode_pass(crops[:1], out, adapted=True)

    def encode_pass(self, crops: Tensor, out: Tensor, *, adapted: bool = False) -> None:
        """Encodes up to MAX_CROPS crops into ``out``, as `encode_crops` does. Call it inside ``attention.chosen()``.
        ``adapted``: with the adapters that `send_adapters` sent, and not in FP8."""
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
        if adapted:
            assert self.changes is not None, "this runtime computes no adapters"
            self._blocks_with_adapters(x, qkv, patches, self.changes.of_crops(n))
        elif self._fp8_blocks:
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
        for block in rehearsed(self.blocks):
            layer_norm(x, block.ln1.weight, block.ln1.bias, pending=block.pending[0], out=u)
            linear(u, block.qkv, out=qkv[: len(x)])
            add_linear(x, self._attend(qkv, patches)[: len(x)], block.proj)
            layer_norm(x, block.ln2.weight, block.ln2.bias, pending=block.pending[1], out=u)
            add_linear(x, linear_gelu(u, block.fc1), block.fc2)

    def _blocks_with_adapters(
        self, x: Tensor, qkv: Tensor, patches: int, changes: list[BlockChanges]
    ) -> None:
        """As `_blocks`, and adds the ``changes`` of each block. That of fc1 applies the GELU."""
        u = torch.empty_like(x)
        for block, change in zip(rehearsed(self.blocks), rehearsed(changes), strict=True):
            layer_norm(x, block.ln1.weight, block.ln1.bias, pending=block.pending[0], out=u)
            linear(u, block.qkv, out=qkv[: len(x)])
            change.qkv.add(u, qkv[: len(x)])
            attended = self._attend(qkv, patches)[: len(x)]
            add_linear(x, attended, block.proj)
            change.proj.add(attended, x)
            layer_norm(x, block.ln2.weight, block.ln2.bias, pending=block.pending[1], out=u)
            hidden = linear(u, block.fc1)
            change.fc1.add(u, hidden, gelu=True)
            add_linear(x, hidden, block.fc2)
            change.fc2.add(hidden, x)

    def _blocks_in_fp8(self, x: Tensor, qkv: Tensor, patches: int) -> None:
        """As `_blocks`, in FP8. Where a GEMM does not add its output to the stream, the next LayerNorm does."""
        wanted = self._fp8_blocks[0].fc1.wants_norms
        norms = self._post_pending.new_empty(len(x)) if wanted else None
        rest: Tensor | None = None
        blocks, in_fp8 = rehearsed(self.blocks), rehearsed(self._fp8_blocks)
        for block, fp8 in zip(blocks, in_fp8, strict=True):
            ln, pending = block.ln1, block.pending[0]
            u = layer_norm_fp8(x, ln.weight, ln.bias, pending=pending, add=rest)
            fp8.qkv(u, out=qkv[: len(x)])
            if fp8.proj is None:
                add_linear(x, self._attend(qkv, patches)[: len(x)], block.proj)
                rest = None
            else:
                attended = self._attend(qkv, patches, FP8)[: len(x)]
                rest = fp8.proj.add(Fp8Rows(attended, self._ones[: len(x)]), x)
            ln, pending = block.ln2, block.pending[1]
            u = layer_norm_fp8(x, ln.weight, ln.bias, pending=pending, add=rest, norms=norms)
            rest = fp8.fc2.add(fp8.fc1(u, norms), x)
        if rest is not None:
            x.add_(rest)

    def _attend(self, qkv: Tensor, patches: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the attention output [rows, enc_dim] of ``qkv`` [rows, 3 * enc_dim], in its dtype or in ``dtype``."""
        heads, dim = self.config.enc_n_heads, self.config.enc_dim
        return self.attention(qkv.view(-1, patches, 3, heads, dim // heads), dtype).view(-1, dim)

    def embed_many(
        self,
        images: Sequence[tuple[Tensor, tuple[int, int]]],
        adapters: Sequence[Adapter | None] = (),
    ) -> list[Tensor]:
        """Returns the embedding [grid * grid, proj_out_dim] of each image.

        ``images``: for each image the features [n, patches, enc_dim] of its distinct crops, and its tiling.
        ``adapters``: those of the images; empty if no image has one.
        """
        embeddings: list[Tensor] = []
        size = min(self._most_images, MAX_IMAGES)
        for first in range(0, len(images), size):
            last = first + size
            embeddings += self._embed_pass(images[first:last], adapters[first:last])
        return embeddings

    def warm_up_projector(self) -> None:
        """Compiles the kernels of adapters."""
        if self.changes is None:
            return
        self.changes.send_images([None])
        config = self.config
        features = self._patch_weight.new_zeros(1, config.grid**2, 2 * config.enc_dim)
        self._project_with_adapters(features.flatten(0, 1), 1)

    def _embed_pass(
        self,
        images: Sequence[tuple[Tensor, tuple[int, int]]],
        adapters: Sequence[Adapter | None],
    ) -> list[Tensor]:
        grid, margin = self.config.grid, self.config.overlap_margin
        both = self._patch_weight.new_empty(len(images), grid * grid, 2 * self.config.enc_dim)
        for row, (features, tiling) in zip(both, images, strict=True):
            pool_tiles(features, tiling, grid, margin, out=row)
        rows = both.flatten(0, 1)
        if changing_projector(adapters):
            assert self.changes is not None, "this runtime computes no adapters"
            self.changes.send_images(adapters)
            embedded = self._project_with_adapters(rows, len(images))
        else:
            embedded = linear(linear_gelu(rows, self._fc1), self._fc2)
        return list(embedded.view(len(images), grid * grid, -1))

    def _project_with_adapters(self, rows: Tensor, count: int) -> Tensor:
        """Projects the ``rows`` of ``count`` images with the adapters that `VisionChanges.send_images` sent."""
        assert self.changes is not None, "this runtime computes no adapters"
        fc1, fc2 = self.changes.of_images(count)
        hidden = linear(rows, self._fc1)
        fc1.add(rows, hidden, gelu=True)
        embedded = linear(hidden, self._fc2)
        fc2.add(hidden, embedded)
        return embedded
