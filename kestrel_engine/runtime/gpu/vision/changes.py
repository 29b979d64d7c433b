"""VisionChanges: what adapters change in the passes of the vision tower and of the projector.

A crop has the adapter of its image. The kernels are those of prompts (kernels.adapters.rows), with patches for tokens.
The patches of a crop are adjacent, so a tile of rows has one adapter, or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ....kernels.adapters.rows import change_rows
from ....kernels.adapters.slabs import RowSlabs
from ....types.adapter import Adapter
from ..adapters.layout import (
    PROJECTOR,
    TOWER_ATTENTION,
    TOWER_KINDS,
    TOWER_MLP,
    SlabLayout,
    SlabPlace,
)
from ..adapters.pass_slabs import PassSlabs


@dataclass(frozen=True, slots=True)
class VisionChange:
    """The change of one linear layer, for rows with the slabs ``rows``."""

    rows: RowSlabs
    place: SlabPlace

    def add(self, x: Tensor, y: Tensor, *, gelu: bool = False) -> None:
        """Adds the change for the input ``x`` [rows, in] to ``y`` [rows, out]. ``gelu``: then applies the tanh GELU."""
        change_rows(x, self.rows, self.place.a_at, self.place.b_at, add_to=y, gelu=gelu)


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """The changes of one block of the tower."""

    qkv: VisionChange
    proj: VisionChange
    fc1: VisionChange
    fc2: VisionChange


class VisionChanges:
    """Owns which slabs the crops of a pass of the tower use, up to ``max_crops``, and the images of a pass of the
    projector, up to ``max_images``. A patch is a row, and a crop or an image has ``patches``. The caller keeps the
    adapters of a pass until it has run."""

    def __init__(
        self,
        layout: SlabLayout,
        anchor: Tensor,
        *,
        max_crops: int,
        max_images: int,
        patches: int,
    ) -> None:
        self._tower, self._projector, self._patches = layout.tower, layout.projector, patches
        device = anchor.device
        self._crops = PassSlabs(anchor, max_crops, max_crops, device, TOWER_KINDS)
        self._images = PassSlabs(anchor, max_images, max_images, device, (PROJECTOR,))

    def send_crops(self, adapters: Sequence[Adapter | None], padded: int) -> None:
        """Enqueues the copy for a pass over crops with ``adapters``, and crops of padding up to ``padded``."""
        self._crops.send(adapters, padded)

    def send_images(self, adapters: Sequence[Adapter | None]) -> None:
        """Enqueues the copy for a pass over images with ``adapters``."""
        self._images.send(adapters, len(adapters))

    def of_crops(self, count: int) -> list[BlockChanges]:
        """Returns the changes of each block for a pass over ``count`` crops."""
        mlp, attention = (
            self._crops.kind(kind, count).repeated(self._patches)
            for kind in (TOWER_MLP, TOWER_ATTENTION)
        )
        return [
            BlockChanges(
                VisionChange(attention, block.qkv),
                VisionChange(attention, block.proj),
                VisionChange(mlp, block.fc1),
                VisionChange(mlp, block.fc2),
            )
            for block in self._tower
        ]

    def of_images(self, count: int) -> tuple[VisionChange, VisionChange]:
        """Returns the changes of the projector's fc1 and fc2 for a pass over ``count`` images."""
        rows = self._images.kind(PROJECTOR, count).repeated(self._patches)
        fc1, fc2 = self._projector
        return VisionChange(rows, fc1), VisionChange(rows, fc2)


def changing_tower(adapters: Sequence[Adapter | None]) -> bool:
    return any(each is not None and each.changes_tower for each in adapters)


def changing_projector(adapters: Sequence[Adapter | None]) -> bool:
    return any(each is not None and PROJECTOR in each.slabs for each in adapters)
