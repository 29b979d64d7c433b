"""SlabLayout: where each layer's A and B are in a slab (kernels.adapters.slabs), and slabs of loaded adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.adapters.slabs import RANKS
from ....models.low_rank import LowRank
from ....types.model_config import TextConfig


@dataclass(frozen=True, slots=True)
class Place:
    """The change of one linear layer in a slab: A [16, columns] from ``a_at`` on, B [rows, 16] from ``b_at`` on."""

    a_at: int
    b_at: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class MlpPlaces:
    """The changes of a dense MLP."""

    fc1: Place
    fc2: Place


class SlabLayout:
    """The layout for a model, in ``dtype``, and slabs on ``device``. It has places for the dense MLPs of the text
    decoder. ``size``: the elements of a slab."""

    def __init__(self, text: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self.size = 0
        dense = text.n_layers if text.moe is None else text.moe.start_layer
        self.mlps = [self._mlp(text.dim, text.ff_dim) for _ in range(dense)]
        """By layer; layers with experts have none."""
        self._places = {
            f"text.blocks.{layer}.mlp.{name}": place
            for layer, mlp in enumerate(self.mlps)
            for name, place in (("fc1", mlp.fc1), ("fc2", mlp.fc2))
        }

    def _mlp(self, dim: int, inner: int) -> MlpPlaces:
        return MlpPlaces(self._place(inner, dim), self._place(dim, inner))

    def _place(self, rows: int, columns: int) -> Place:
        a_at = self.size
        b_at = a_at + RANKS * columns
        self.size = b_at + RANKS * rows
        return Place(a_at, b_at, rows, columns)

    def mlp(self, layer: int) -> MlpPlaces | None:
        """Returns the places of a layer's dense MLP; None if the layer has experts."""
        return self.mlps[layer] if layer < len(self.mlps) else None

    def refusal(self, modules: Iterable[str]) -> str | None:
        """Returns why an adapter that changes ``modules`` can't be computed; None if it can."""
        other = next((module for module in modules if module not in self._places), None)
        if other is None:
            return None
        return (
            f"changes {other}; the GPU kernels compute adapters of dense text MLPs (mlp.fc1 and mlp.fc2) only, "
            "plain torch (--no-compile) computes all"
        )

    def num_bytes(self, ranks: Mapping[str, int]) -> int:
        """Returns the bytes of an adapter's slabs. ``ranks``: by module."""
        return _slabs_of(max(ranks.values())) * self.size * self.dtype.itemsize

    def pack(self, weights: Mapping[str, LowRank]) -> Tensor:
        """Returns the slabs [n, size] on the device of an adapter on the CPU, which has no refusal. Ranks and layers
        that the adapter lacks are zero."""
        count = _slabs_of(max(change.a.shape[-2] for change in weights.values()))
        slabs = torch.zeros(count, self.size, dtype=self.dtype)
        for module, change in weights.items():
            place = self._places[module]
            left = slabs[:, place.a_at : place.b_at].view(count, RANKS, place.columns)
            right = slabs[:, place.b_at : place.b_at + RANKS * place.rows]
            right = right.view(count, place.rows, RANKS)
            for slab in range(_slabs_of(change.a.shape[0])):
                some = slice(slab * RANKS, (slab + 1) * RANKS)
                a, b = change.a[some], change.b[:, some]
                left[slab, : len(a)] = a
                right[slab, :, : len(a)] = b
        return slabs.to(self._device)


def _slabs_of(rank: int) -> int:
    return -(-rank // RANKS)
