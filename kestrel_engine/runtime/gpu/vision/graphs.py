"""VisionGraphs: captured CUDA graphs of the vision tower's pass, one for each number of crops.

Without a graph, a pass is some 190 launches, each of which releases the GIL and acquires it again. While other threads
decoded images, the device waited for the host for a tenth of the time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....types.progress import Progress
from .tower import MAX_CROPS, FusedVision


class VisionGraphs:
    """Owns the graphs and their fixed input and output. ``max_crops``, the crops of the largest pass, determines their
    memory."""

    def __init__(
        self, vision: FusedVision, stream: torch.cuda.Stream, *, max_crops: int = MAX_CROPS
    ) -> None:
        assert 1 <= max_crops <= MAX_CROPS, max_crops
        self._vision, self._stream, self._max_crops = vision, stream, max_crops
        config, weight = vision.config, vision.weight
        side = config.crop_size
        self._crops = torch.zeros(
            (max_crops, side, side, config.in_channels), dtype=torch.uint8, device=weight.device
        )
        self._features = weight.new_zeros((max_crops, config.grid**2, config.enc_dim))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, progress: Progress | None = None) -> None:
        """Warms up every size for which attention makes a separate plan, then captures all sizes, the largest first."""
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream), self._vision.attention.chosen():
            self._vision.warm_up(self._max_crops)
            self._stream.synchronize()
            for count in range(self._max_crops, 0, -1):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._vision.encode_pass(self._crops[:count], self._features[:count])
                finally:
                    graph.capture_end()
                self._graphs[count] = graph
                if progress is not None:
                    done = self._max_crops - count + 1
                    progress(done, self._max_crops, f"vision graph of {count} crops")

    def encode_crops(self, crops: Tensor) -> Tensor:
        """As `FusedVision.encode_crops`."""
        config = self._vision.config
        out = self._features.new_empty(len(crops), config.grid**2, config.enc_dim)
        size = math.ceil(len(crops) / math.ceil(len(crops) / self._max_crops))
        for first in range(0, len(crops), size):
            part = crops[first : first + size]
            self._crops[: len(part)].copy_(part)
            self._graphs[len(part)].replay()
            out[first : first + len(part)].copy_(self._features[: len(part)])
        return out

    def clear(self) -> None:
        self._graphs.clear()
