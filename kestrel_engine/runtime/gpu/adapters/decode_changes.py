"""DecodeChanges: what the launches of a decode step do for adapters, for each layer.

Changes are parts of other launches. The LayerNorm before a block multiplies by the A of qkv and fc1. The first GEMM
adds their B, and multiplies by fc2's A. The LayerNorm after the block adds fc2's B, and the whole change of proj.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....kernels.adapters.experts import ExpertChanges
from ....kernels.adapters.layer_norm import NextProducts, SummedChange, WholeChange
from ....kernels.adapters.rows import change_rows
from ....kernels.adapters.slabs import MOST_SLABS, RANKS, shrunk_rows
from ....kernels.linear.skinny_linear import ColumnChange, GemmChanges
from ....kernels.linear.skinny_tiling import MAX_ROWS, adapter_parts
from ..text.layers import TextLayer
from .layout import BlockPlaces, SlabLayout
from .pass_slabs import PassAdapters


class DecodeChanges:
    """Owns the products of up to ``max_rows`` rows with A. In steps of more than MAX_ROWS rows, changes are launches of
    their own."""

    def __init__(
        self, layout: SlabLayout, layers: list[TextLayer], max_rows: int, device: torch.device
    ) -> None:
        self._blocks = layout.blocks
        few = min(max_rows, MAX_ROWS)
        self._first, self._hidden = shrunk_rows(few, device), shrunk_rows(few, device)
        dense = [layer for layer in layers if layer.moe is None]
        counts = [_num_parts(layer, rows) for layer in dense for rows in range(1, few + 1)]
        self._parts = shrunk_rows(max([0, *counts]) * few, device).view(-1)

    def before(self, layer: TextLayer | None, adapters: PassAdapters) -> list[NextProducts]:
        """Returns what the LayerNorm before ``layer`` writes; nothing behind the last layer."""
        rows = adapters.num_rows
        if layer is None or rows > MAX_ROWS:
            return []
        block, found = self._blocks[layer.index], []
        if adapters.attention is not None:
            found.append(NextProducts(adapters.attention, self._first[:rows], block.qkv.a_at))
        if layer.moe is None:
            found.append(NextProducts(adapters.mlp, self._hidden[:rows], block.fc1.a_at))
        return found

    def within(
        self, layer: TextLayer, adapters: PassAdapters, *, hidden: bool
    ) -> GemmChanges | None:
        """Returns the part of the first GEMM of ``layer``; None if it has none, or its changes are launches of their
        own. ``hidden``: the GEMM computes the hidden layer, too."""
        rows = adapters.num_rows
        if rows > MAX_ROWS:
            return None
        block, begin = self._blocks[layer.index], layer.qkv.weight.shape[0]
        first = None
        if adapters.attention is not None:
            first = ColumnChange(adapters.attention, block.qkv.b_at, self._first[:rows])
        if not hidden:
            return None if first is None else GemmChanges(begin, first)
        up = ColumnChange(adapters.mlp, block.fc1.b_at, self._hidden[:rows])
        return GemmChanges(begin, first, up, block.fc2.a_at, self._parts_of(layer, rows))

    def after_mlp(self, layer: TextLayer, adapters: PassAdapters) -> SummedChange | None:
        """Returns the change of fc2 that the LayerNorm after ``layer`` adds."""
        rows, place = adapters.num_rows, self._blocks[layer.index].fc2
        if layer.moe is not None or rows > MAX_ROWS:
            return None
        return SummedChange(adapters.mlp, self._parts_of(layer, rows), place.b_at)

    def after_attention(
        self, layer: TextLayer, adapters: PassAdapters, attended: Tensor, u: Tensor
    ) -> list[WholeChange]:
        """Returns the changes of proj that the LayerNorm after ``layer`` adds. ``attended``: the result of attention.
        ``u``: the block's normalised input."""
        block = self._blocks[layer.index]
        inputs = (
            (adapters.attention, attended, block.proj),
            (adapters.proj_input, u, block.proj_input),
        )
        return [
            WholeChange(rows, x, place.a_at, place.b_at)
            for rows, x, place in inputs
            if rows is not None
        ]

    def add_first(
        self, layer: TextLayer, adapters: PassAdapters, u: Tensor, out: Tensor, *, hidden: bool
    ) -> None:
        """Adds the changes of qkv, and with ``hidden`` of fc1 before GELU, to the result ``out`` of the first GEMM, and
        applies GELU to the hidden layer."""
        block, begin = self._blocks[layer.index], layer.qkv.weight.shape[0]
        if adapters.attention is not None:
            change_rows(u, adapters.attention, *block.qkv[:2], add_to=out[:, :begin])
        if hidden:
            change_rows(u, adapters.mlp, *block.fc1[:2], add_to=out[:, begin:], gelu=True)

    def experts(self, layer: TextLayer, adapters: PassAdapters | None) -> ExpertChanges | None:
        return expert_changes(self._blocks[layer.index], adapters)

    def add_mlp(
        self, layer: TextLayer, adapters: PassAdapters, hidden: Tensor, output: Tensor
    ) -> None:
        """Adds the change of fc2 to ``output``."""
        place = self._blocks[layer.index].fc2
        change_rows(hidden, adapters.mlp, *place[:2], add_to=output)

    def _parts_of(self, layer: TextLayer, rows: int) -> Tensor:
        shape = _num_parts(layer, rows), rows, RANKS * MOST_SLABS
        return self._parts[: math.prod(shape)].view(shape)


def expert_changes(block: BlockPlaces, adapters: PassAdapters | None) -> ExpertChanges | None:
    """Returns the changes of an MoE block's experts; None without adapters."""
    if adapters is None:
        return None
    return ExpertChanges(adapters.experts, *block.fc1[:2], *block.fc2[:2])


def _num_parts(layer: TextLayer, rows: int) -> int:
    return adapter_parts(rows, layer.reads.weight, layer.qkv.weight.shape[0])
