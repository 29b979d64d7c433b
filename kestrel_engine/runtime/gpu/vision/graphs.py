"""VisionGraphs: captured CUDA graphs of the vision tower's pass, one for each number of crops, others with adapters.

Without a graph, a pass is some 190 launches, each of which releases the GIL and acquires it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ....types.adapter import Adapter
from ....types.progress import Progress
from ..attention.patches import BATCHES
from ..capture import captured
from ..room import leaving_room
from .tower import MAX_CROPS, FusedVision, even_size

WITH_ROOM = range(28, 49)
"""The numbers of crops of passes that may leave room. The kernels of a smaller one end soon, and a step beside decoding
has no more crops by default. Each number takes another graph at the start."""


class CropPassShape(NamedTuple):
    """The shape of a captured pass. ``adapted``: an adapter of one of its crops changes the tower. ``with_room``: it
    leaves room for decode steps."""

    crops: int
    adapted: bool = False
    with_room: bool = False


class VisionGraphs:
    """Owns the graphs and their fixed input and output. ``max_crops``, the crops of the largest pass, determines their
    memory."""

    def __init__(
        self,
        vision: FusedVision,
        stream: torch.cuda.Stream,
        *,
        max_crops: int = MAX_CROPS,
        with_room: bool = False,
    ) -> None:
        """``with_room``: capture passes that leave room, too, which needs a device that can."""
        assert 1 <= max_crops <= MAX_CROPS, max_crops
        self._vision, self._stream, self._max_crops = vision, stream, max_crops
        config, weight = vision.config, vision.weight
        self._with_room = with_room
        side = config.crop_size
        self._crops = torch.zeros(
            (max_crops, side, side, config.in_channels), dtype=torch.uint8, device=weight.device
        )
        self._features = weight.new_zeros((max_crops, config.grid**2, config.enc_dim))
        self.graphs: dict[CropPassShape, torch.cuda.CUDAGraph] = {}
        # With adapters, not every number of crops has a graph, so that the start takes little longer.
        rungs = (
            () if vision.changes is None else (*(n for n in BATCHES if n < max_crops), max_crops)
        )
        self._adapted_rungs: tuple[int, ...] = rungs

    @property
    def shapes(self) -> list[CropPassShape]:
        """All shapes, the largest first, so that smaller graphs reuse the memory of larger ones."""
        adapted = [CropPassShape(count, True) for count in reversed(self._adapted_rungs)]
        plain = [CropPassShape(count) for count in range(self._max_crops, 0, -1)]
        if not self._with_room:
            return adapted + plain
        roomy = [each._replace(with_room=True) for each in plain if each.crops in WITH_ROOM]
        return adapted + plain + roomy

    def capture(self, progress: Progress | None = None) -> None:
        """Rehearses and captures every shape, the largest first."""
        pool = torch.cuda.graph_pool_handle()
        shapes = self.shapes
        if self._vision.changes is not None:
            with torch.cuda.stream(self._stream):
                self._vision.changes.send_crops((), self._max_crops)
        with self._vision.attention.chosen():
            for index, shape in enumerate(shapes):
                with leaving_room() if shape.with_room else nullcontext():
                    self.graphs[shape] = captured(partial(self.body, shape), self._stream, pool)
                if progress is not None:
                    progress(index + 1, len(shapes), f"vision graph of {shape.crops} crops")

    def encode_crops(
        self,
        crops: Tensor,
        adapters: Sequence[Adapter | None] = (),
        *,
        leave_room: bool = False,
    ) -> Tensor:
        """As `FusedVision.encode_crops`. ``leave_room``: with the passes that leave room, where these exist."""
        config = self._vision.config
        out = self._features.new_empty(len(crops), config.grid**2, config.enc_dim)
        size = even_size(len(crops), self._max_crops)
        for first in range(0, len(crops), size):
            part = crops[first : first + size]
            self._crops[: len(part)].copy_(part)
            own = adapters[first : first + size]
            shape = self._sent(own, len(part))
            roomy = shape._replace(with_room=leave_room)
            self.graphs[roomy if roomy in self.graphs else shape].replay()
            out[first : first + len(part)].copy_(self._features[: len(part)])
        return out

    def _sent(self, adapters: Sequence[Adapter | None], count: int) -> CropPassShape:
        """Returns the shape of a pass over ``count`` crops, and enqueues the copy of where their adapters are."""
        # Without rungs, `send_adapters` refuses adapters.
        padded = next((rung for rung in self._adapted_rungs if rung >= count), count)
        adapted = self._vision.send_adapters(adapters, padded)
        return CropPassShape(padded if adapted else count, adapted)

    def body(self, shape: CropPassShape) -> None:
        count = shape.crops
        self._vision.encode_pass(self._crops[:count], self._features[:count], adapted=shape.adapted)

    def clear(self) -> None:
        self.graphs.clear()
