"""SlabLayout: where each layer's A and B are in a slab (kernels.adapters.slabs), and slabs of loaded adapters.

There are several kinds of slabs, so that an adapter of the MLPs neither takes memory for attention nor has it read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.adapters.slabs import RANKS
from ....models.low_rank import LowRank
from ....types.adapter import INPUT
from ....types.model_config import TextConfig

MLP, ATTENTION, PROJ_INPUT = "mlp", "attention", "proj_input"
"""The kinds: fc1 and fc2 of dense MLPs; qkv and proj; the change of proj that reads the block's normalised input."""
KINDS = (MLP, ATTENTION, PROJ_INPUT)


class Place(NamedTuple):
    """The change of one linear layer in a slab: the offsets of A [16, columns] and B [rows, 16]."""

    a_at: int
    b_at: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """The changes of one block, in the slabs of their kinds. An MoE block has no ``fc1`` and ``fc2``."""

    qkv: Place
    proj: Place
    proj_input: Place
    fc1: Place | None
    fc2: Place | None


class SlabLayout:
    """The layout for the text decoder of a model, in ``dtype``, and slabs on ``device``. ``sizes``: the elements of a
    slab, by kind. ``blocks``: by layer."""

    def __init__(self, text: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self.sizes = dict.fromkeys(KINDS, 0)
        self._places: dict[str, tuple[str, Place]] = {}
        dense = text.n_layers if text.moe is None else text.moe.start_layer
        self.blocks = [self._block(text, i, dense=i < dense) for i in range(text.n_layers)]

    def _block(self, text: TextConfig, index: int, *, dense: bool) -> BlockPlaces:
        name, dim, inner = f"text.blocks.{index}", text.dim, text.ff_dim
        return BlockPlaces(
            self._place(f"{name}.attn.qkv", ATTENTION, 3 * dim, dim),
            self._place(f"{name}.attn.proj", ATTENTION, dim, dim),
            self._place(f"{name}.attn.proj{INPUT}", PROJ_INPUT, dim, dim),
            self._place(f"{name}.mlp.fc1", MLP, inner, dim) if dense else None,
            self._place(f"{name}.mlp.fc2", MLP, dim, inner) if dense else None,
        )

    def _place(self, module: str, kind: str, rows: int, columns: int) -> Place:
        a_at = self.sizes[kind]
        b_at = a_at + RANKS * columns
        self.sizes[kind] = b_at + RANKS * rows
        place = Place(a_at, b_at, rows, columns)
        self._places[module] = kind, place
        return place

    def refusal(self, modules: Iterable[str]) -> str | None:
        """Returns why an adapter that changes ``modules`` can't be computed; None if it can."""
        other = next((module for module in modules if module not in self._places), None)
        if other is None:
            return None
        return (
            f"changes {other}; the GPU kernels compute adapters of the text decoder's attention and dense MLPs only, "
            "plain torch (--no-compile) computes all"
        )

    def num_bytes(self, ranks: Mapping[str, int]) -> int:
        """Returns the bytes of an adapter's slabs. ``ranks``: by module."""
        return self.dtype.itemsize * sum(
            count * self.sizes[kind] for kind, count in self._counts(ranks).items()
        )

    def pack(self, weights: Mapping[str, LowRank]) -> dict[str, Tensor]:
        """Returns the slabs [n, size] on the device, by kind, of an adapter on the CPU, which has no refusal. Ranks and
        layers that the adapter lacks are zero."""
        counts = self._counts({module: len(change.a) for module, change in weights.items()})
        found = {
            kind: torch.zeros(count, self.sizes[kind], dtype=self.dtype)
            for kind, count in counts.items()
        }
        for module, change in weights.items():
            kind, place = self._places[module]
            slabs, count = found[kind], counts[kind]
            left = slabs[:, place.a_at : place.b_at].view(count, RANKS, place.columns)
            right = slabs[:, place.b_at : place.b_at + RANKS * place.rows]
            right = right.view(count, place.rows, RANKS)
            for slab in range(_slabs_of(len(change.a))):
                some = slice(slab * RANKS, (slab + 1) * RANKS)
                a, b = change.a[some], change.b[:, some]
                left[slab, : len(a)] = a
                right[slab, :, : len(a)] = b
        return {kind: slabs.to(self._device) for kind, slabs in found.items()}

    def _counts(self, ranks: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of slabs of each kind that an adapter has."""
        counts: dict[str, int] = {}
        for module, rank in ranks.items():
            kind, _ = self._places[module]
            counts[kind] = max(counts.get(kind, 0), _slabs_of(rank))
        return counts


def _slabs_of(rank: int) -> int:
    return -(-rank // RANKS)
