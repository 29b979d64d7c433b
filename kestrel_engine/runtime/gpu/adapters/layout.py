"""SlabLayout: where each layer's A and B are in a slab (kernels.adapters.slabs), and slabs of loaded adapters.

There are several kinds of slabs, so that an adapter of the MLPs neither takes memory for attention nor has it read. The
names of kinds of vision begin as the modules do that they change (`Adapter.changes_tower`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.adapters.experts import EXPERT_RANKS, WIDTH
from ....kernels.adapters.slabs import RANKS, UNIT
from ....models.low_rank import LowRank
from ....types.adapter import INPUT, Adapter
from ....types.model_config import ModelConfig, TextConfig, VisionConfig

MLP, ATTENTION, PROJ_INPUT, EXPERTS = "mlp", "attention", "proj_input", "experts"
"""The kinds: fc1 and fc2 of dense MLPs; qkv and proj; the change of proj that reads the block's normalised input; fc1
and fc2 of experts."""
KINDS = (MLP, ATTENTION, PROJ_INPUT, EXPERTS)
"""Those of the text decoder."""
TOWER_MLP, TOWER_ATTENTION, PROJECTOR = "vision.blocks.mlp", "vision.blocks.attn", "vision.proj_mlp"
"""fc1 and fc2 of the tower's blocks; their qkv and proj; fc1 and fc2 of the projector."""
TOWER_KINDS = (TOWER_MLP, TOWER_ATTENTION)


class SlabPlace(NamedTuple):
    """The change of one linear layer in a slab: the offsets of A [16, columns] and B [rows, 16]; of ``experts``,
    those of A [experts, EXPERT_RANKS, columns] and B [experts, EXPERT_RANKS, rows]."""

    a_at: int
    b_at: int
    rows: int
    columns: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """The changes of one block, in the slabs of their kinds. In an MoE block, ``fc1`` and ``fc2`` are
    those of experts."""

    qkv: SlabPlace
    proj: SlabPlace
    proj_input: SlabPlace
    fc1: SlabPlace
    fc2: SlabPlace


@dataclass(frozen=True, slots=True)
class TowerPlaces:
    """The changes of one block of the vision tower."""

    qkv: SlabPlace
    proj: SlabPlace
    fc1: SlabPlace
    fc2: SlabPlace


class SlabLayout:
    """The layout for a model, in ``dtype``, and slabs on ``device``. ``sizes``: the elements of a slab, by kind.
    ``blocks``: of the text decoder, by layer. ``tower``: of the vision tower, by layer. ``projector``: its fc1 and
    fc2."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self.sizes = dict.fromkeys((*KINDS, *TOWER_KINDS, PROJECTOR), 0)
        self._places: dict[str, tuple[str, SlabPlace]] = {}
        text, vision = model.text, model.vision
        self.blocks = [self._block(text, index) for index in range(text.n_layers)]
        self.tower = [self._tower_block(vision, index) for index in range(vision.enc_n_layers)]
        inner = vision.proj_inner_dim
        self.projector = (
            self._place("vision.proj_mlp.fc1", PROJECTOR, inner, 2 * vision.enc_dim),
            self._place("vision.proj_mlp.fc2", PROJECTOR, vision.proj_out_dim, inner),
        )
        # Slabs begin at whole units.
        self.sizes = {kind: -(-size // UNIT) * UNIT for kind, size in self.sizes.items()}

    def _block(self, text: TextConfig, index: int) -> BlockPlaces:
        name, dim, inner = f"text.blocks.{index}", text.dim, text.ff_dim
        attention = (
            self._place(f"{name}.attn.qkv", ATTENTION, 3 * dim, dim),
            self._place(f"{name}.attn.proj", ATTENTION, dim, dim),
            self._place(f"{name}.attn.proj{INPUT}", PROJ_INPUT, dim, dim),
        )
        moe = text.moe
        if moe is None or index < moe.start_layer:
            fc1 = self._place(f"{name}.mlp.fc1", MLP, inner, dim)
            fc2 = self._place(f"{name}.mlp.fc2", MLP, dim, inner)
        else:
            inner, count = moe.expert_inner_dim, moe.num_experts
            fc1 = self._place(f"{name}.mlp.fc1", EXPERTS, 2 * inner, dim, count)
            fc2 = self._place(f"{name}.mlp.fc2", EXPERTS, dim, inner, count)
        return BlockPlaces(*attention, fc1, fc2)

    def _tower_block(self, vision: VisionConfig, index: int) -> TowerPlaces:
        name, dim, inner = f"vision.blocks.{index}", vision.enc_dim, vision.enc_ff_dim
        return TowerPlaces(
            self._place(f"{name}.attn.qkv", TOWER_ATTENTION, 3 * dim, dim),
            self._place(f"{name}.attn.proj", TOWER_ATTENTION, dim, dim),
            self._place(f"{name}.mlp.fc1", TOWER_MLP, inner, dim),
            self._place(f"{name}.mlp.fc2", TOWER_MLP, dim, inner),
        )

    def _place(
        self, module: str, kind: str, rows: int, columns: int, experts: int = 0
    ) -> SlabPlace:
        ranks = experts * EXPERT_RANKS or RANKS
        a_at = self.sizes[kind]
        b_at = a_at + ranks * columns
        self.sizes[kind] = b_at + ranks * rows
        place = SlabPlace(a_at, b_at, rows, columns, experts)
        self._places[module] = kind, place
        return place

    def refusal(self, ranks: Mapping[str, int]) -> str | None:
        """Returns why an adapter can't be computed; None if it can. ``ranks``: by module."""
        for module, rank in ranks.items():
            if rank > WIDTH and self._places[module][0] == EXPERTS:
                return (
                    f"changes {module} with rank {rank}; the GPU kernels compute adapters of experts up to rank "
                    f"{WIDTH}, plain torch (--no-compile) computes all"
                )
        return None

    def num_bytes(self, ranks: Mapping[str, int]) -> int:
        """Returns the bytes of an adapter's slabs. ``ranks``: by module."""
        return self.dtype.itemsize * sum(
            count * self.sizes[kind] for kind, count in self._counts(ranks).items()
        )

    def pack(self, weights: Mapping[str, LowRank]) -> dict[str, Tensor]:
        """As `packed`, on the device."""
        return {kind: slabs.to(self._device) for kind, slabs in self.packed(weights).items()}

    def packed(self, weights: Mapping[str, LowRank]) -> dict[str, Tensor]:
        """Returns the slabs [n, size] on the CPU, by kind, of an adapter on the CPU, which has no refusal. Ranks and
        layers that the adapter lacks are zero."""
        counts = self._counts({name: change.a.shape[-2] for name, change in weights.items()})
        found = {
            kind: torch.zeros(count, self.sizes[kind], dtype=self.dtype)
            for kind, count in counts.items()
        }
        for module, change in weights.items():
            kind, place = self._places[module]
            for slab, values in enumerate(found[kind]):
                _fill(values, place, change, slab)
        return found

    def unpacked(self, adapter: Adapter) -> dict[str, LowRank]:
        """Returns an adapter's changes of the vision tower, by module, from its slabs. Layers it lacks are zero."""
        found = {}
        for module, (kind, place) in self._places.items():
            if kind not in TOWER_KINDS or (slabs := adapter.slabs.get(kind)) is None:
                continue
            a = slabs[:, place.a_at : place.b_at].reshape(-1, place.columns)
            b = slabs[:, place.b_at : place.b_at + RANKS * place.rows]
            found[module] = LowRank(a, b.reshape(-1, place.rows, RANKS).transpose(0, 1).flatten(1))
        return found

    def _counts(self, ranks: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of slabs of each kind that an adapter has."""
        counts: dict[str, int] = {}
        for module, rank in ranks.items():
            kind, _ = self._places[module]
            each = EXPERT_RANKS if kind == EXPERTS else RANKS
            counts[kind] = max(counts.get(kind, 0), -(-rank // each))
        return counts


def _fill(slab: Tensor, place: SlabPlace, change: LowRank, index: int) -> None:
    """Writes the ranks of the ``index``-th slab of a change, if it has as many."""
    each = EXPERT_RANKS if place.experts else RANKS
    ranks = slice(index * each, (index + 1) * each)
    a, b = change.a[..., ranks, :], change.b[..., ranks]
    count = a.shape[-2]
    if place.experts:
        left = slab[place.a_at : place.b_at].view(place.experts, each, place.columns)
        right = slab[place.b_at : place.b_at + place.experts * each * place.rows]
        left[:, :count] = a
        right.view(place.experts, each, place.rows)[:, :count] = b.transpose(1, 2)
        return
    left = slab[place.a_at : place.b_at].view(each, place.columns)
    right = slab[place.b_at : place.b_at + each * place.rows].view(place.rows, each)
    left[:count] = a
    right[:, :count] = b
