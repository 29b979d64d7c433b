"""DecodeGraphs: one captured CUDA graph for each size of a decode batch and each kind of sampling.

A graph replays a pass with one launch; it reads and writes the same buffers each time, so it serves a fixed number of
rows. Batches between two rungs of the ladder are padded to the next.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (done, in all, what)."""


class Variant(NamedTuple):
    """What a pass is compiled for."""

    num_rows: int
    greedy: bool
    """No row draws a random number."""
    spatial: bool
    """Rows may be fed, and may sample, coordinates and sizes."""


def ladder(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 rows up to 64, every 16 up to 128, every 32 beyond: padding stays small where a row costs
    most."""
    rungs = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4097, 32)]
    return (*(n for n in rungs if n < max_rows), max_rows)


class DecodeGraphs:
    """``body`` enqueues one pass of a variant on the current stream, without waiting for the device."""

    def __init__(
        self, body: Callable[[Variant], None], max_rows: int, *, stream: torch.cuda.Stream | None
    ) -> None:
        self._body, self._stream = body, stream
        self._rungs = ladder(max_rows)
        self._graphs: dict[Variant, torch.cuda.CUDAGraph] = {}

    @property
    def variants(self) -> list[Variant]:
        """All there are, the largest first: smaller ones then fit into the memory of larger ones."""
        return [
            Variant(rows, greedy, spatial)
            for rows in reversed(self._rungs)
            for greedy in (True, False)
            for spatial in (True, False)
        ]

    def padded(self, num_rows: int) -> int:
        """The rung that serves ``num_rows``."""
        return self._rungs[bisect.bisect_left(self._rungs, num_rows)]

    def capture(self, progress: Progress | None = None) -> None:
        """Runs and captures every variant; compiles what is not compiled yet. Only on a CUDA device."""
        assert self._stream is not None, "graphs are captured on a stream of a CUDA device"
        variants = self.variants
        pool = torch.cuda.graph_pool_handle()
        for index, variant in enumerate(variants):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                self._body(variant)
                self._stream.synchronize()
                # Other threads may use the device while the server starts: that must not break the capture.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._body(variant)
                finally:
                    graph.capture_end()
            self._graphs[variant] = graph
            if progress is not None:
                progress(index + 1, len(variants), f"decode graph of {variant.num_rows} rows")

    def run(self, variant: Variant) -> None:
        """``variant.num_rows`` is a rung."""
        graph = self._graphs.get(variant)
        if graph is None:
            self._body(variant)
        else:
            graph.replay()

    def clear(self) -> None:
        self._graphs.clear()
