"""CropGraphs: captured graphs that make the crops of an image that comes alone, one graph for each size of image.

While nothing else is asked of the server, the device waits for these launches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....types.model_config import VisionConfig
from ..capture import record_graph

ARENA_BYTES = 16 << 20
"""An image that needs more for pixels and intermediate results has no graph. One of 1920x1080 pixels needs 12 MB."""

GRAPHS_KEPT = 32
"""The sizes with a graph. The one that was used the longest time ago makes room for a new one."""

SEEN_KEPT = 256
"""The sizes that are remembered as seen once."""

Replay = Callable[[], object]
Launch = Callable[[Tensor, Tensor], None]
"""Enqueues the passes of an image whose pixels begin the first tensor, the arena; its crops go to the second."""


@dataclass(frozen=True, slots=True, eq=False)
class CropGraph:
    """Makes the ``crops`` [n, S, S, 3] uint8 of the pixels at the beginning of ``arena`` [m] uint8."""

    arena: Tensor
    crops: Tensor
    replay: Replay
    launch: Launch
    """Holds the tables that the graph reads."""


class CropGraphs:
    """Owns the graphs, and the arena and crops that all of them use. A size is captured when it comes for the second
    time, so that a size that comes once costs nothing.

    All work is enqueued on one stream, so an image is not overwritten before its crops are made.
    """

    def __init__(
        self,
        most_crops: int,
        side: int,
        device: torch.device,
        record: Callable[[Callable[[], object]], Replay],
    ) -> None:
        """``most_crops``: images with more have no graph. ``record``: captures what a function enqueues, and returns
        what enqueues it again."""
        self._record = record
        self._arena = torch.empty(ARENA_BYTES, dtype=torch.uint8, device=device)
        self._crops = torch.empty((most_crops, side, side, 3), dtype=torch.uint8, device=device)
        self._graphs: OrderedDict[Hashable, CropGraph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._wanted: tuple[Hashable, int, Launch] | None = None

    def find(self, size: Hashable) -> CropGraph | None:
        """Returns the graph for images of ``size``; None if there is none."""
        graph = self._graphs.get(size)
        if graph is not None:
            self._graphs.move_to_end(size)
        return graph

    def note(self, size: Hashable, num_bytes: int, num_crops: int, launch: Launch) -> None:
        """Notes that an image of ``size`` came alone, which needs ``num_bytes`` of an arena. The second one makes
        `capture` capture ``launch``."""
        if num_bytes > len(self._arena) or num_crops > len(self._crops):
            return
        if size in self._seen:
            self._wanted = (size, num_crops, launch)
            return
        self._seen[size] = None
        if len(self._seen) > SEEN_KEPT:
            self._seen.popitem(last=False)

    def capture(self) -> None:
        """Captures the last size that came for the second time, if there is one. The host needs time for it, so call it
        when the device has work."""
        if self._wanted is None:
            return
        (size, num_crops, launch), self._wanted = self._wanted, None
        crops = self._crops[:num_crops]
        replay = self._record(lambda: launch(self._arena, crops))
        self._graphs[size] = CropGraph(self._arena, crops, replay, launch)
        if len(self._graphs) > GRAPHS_KEPT:
            self._graphs.popitem(last=False)

    def clear(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._wanted = None


def captured_crops(vision: VisionConfig, device: torch.device) -> CropGraphs:
    """Returns graphs for a CUDA device, none of which is captured yet. They are captured and replayed on the current
    stream, which must be the same each time, and not the default one."""
    pool = torch.cuda.graph_pool_handle()

    def record(body: Callable[[], object]) -> Replay:
        return record_graph(body, pool).replay

    return CropGraphs(1 + vision.max_crops, vision.crop_size, device, record)
