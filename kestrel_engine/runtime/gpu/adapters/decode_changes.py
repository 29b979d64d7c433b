"""DecodeChanges: what the launches of a decode step do for adapters, for each layer.

The changes of a dense MLP are halves of other launches: the LayerNorm before it multiplies by fc1's A, the first GEMM
adds fc1's B and multiplies by fc2's A, and the LayerNorm after it adds fc2's B.
"""

from __future__ import annotations

import math

import torch

from ....kernels.adapters.layer_norm import Down, Up
from ....kernels.adapters.slabs import MOST_SLABS, RANKS, RowSlabs, shrunk_rows
from ....kernels.linear.skinny_linear import MAX_ROWS, Adapted, adapter_parts
from ..text.layers import TextLayer
from .layout import SlabLayout


class DecodeChanges:
    """Owns the products of up to ``max_rows`` rows with A. Steps of more than MAX_ROWS rows do not use it."""

    def __init__(
        self, layout: SlabLayout, layers: list[TextLayer], max_rows: int, device: torch.device
    ) -> None:
        self.layout = layout
        few = min(max_rows, MAX_ROWS)
        self._shrunk = shrunk_rows(few, device)
        most = max(
            [0, *(_num_parts(layer, r) for layer in layers[: len(layout.mlps)] for r in _to(few))]
        )
        self._parts = shrunk_rows(most * few, device).view(-1)

    def before(self, layer: TextLayer | None, rows: int) -> Up | None:
        """Returns the LayerNorm's part before ``layer``; None for experts, and behind the last layer."""
        places = None if layer is None else self.layout.mlp(layer.index)
        return None if places is None else Up(self._shrunk[:rows], places.fc1.a_at)

    def within(self, layer: TextLayer, adapters: RowSlabs) -> Adapted | None:
        """Returns the part of the first GEMM of ``layer``; None for experts."""
        places = self.layout.mlp(layer.index)
        if places is None:
            return None
        rows = len(adapters.first)
        shrunk, parts = self._shrunk[:rows], self._parts_of(layer, rows)
        return Adapted(adapters, _begin(layer), places.fc1.b_at, shrunk, places.fc2.a_at, parts)

    def after(self, layer: TextLayer, rows: int) -> Down | None:
        """Returns the LayerNorm's part after ``layer``; None for experts."""
        places = self.layout.mlp(layer.index)
        return None if places is None else Down(self._parts_of(layer, rows), places.fc2.b_at)

    def _parts_of(self, layer: TextLayer, rows: int) -> torch.Tensor:
        shape = _num_parts(layer, rows), rows, RANKS * MOST_SLABS
        return self._parts[: math.prod(shape)].view(shape)


def _begin(layer: TextLayer) -> int:
    """Returns the first column of the hidden layer in the result of a dense layer's first GEMM."""
    return layer.qkv.weight.shape[0]


def _num_parts(layer: TextLayer, rows: int) -> int:
    return adapter_parts(rows, layer.reads.weight, _begin(layer))


def _to(rows: int) -> range:
    return range(1, rows + 1)
