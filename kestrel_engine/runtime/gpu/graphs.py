"""PassGraphs: a captured CUDA graph for each number of rows and each kind of sampling.

Replaying a graph runs a whole pass with one launch. A graph always uses the same buffers, so it has a fixed number of
rows. A batch is padded to the next size for which there is a graph.
"""

from __future__ import annotations

import bisect
import enum
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...types.progress import Progress
from .capture import captured

logger = logging.getLogger(__name__)


class RowAdapters(enum.IntEnum):
    """What the adapters of a pass's rows change in the decoder. Most fine-tunes change MLPs only, which costs less."""

    NONE = 0
    MLPS = 1
    ALL = 2


class Variant(NamedTuple):
    """The properties for which a pass is compiled and captured."""

    num_rows: int
    greedy: bool
    """No row draws a random number."""
    spatial: bool
    """Rows may have coordinates and sizes as input, and may sample them."""
    shared: bool = False
    """Positions that several rows share are read once."""
    adapters: RowAdapters = RowAdapters.NONE


def ladder(max_rows: int) -> tuple[int, ...]:
    """Returns the captured batch sizes: 1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, and of 32 beyond.

    The sizes are closest together for small batches, where a row of padding costs most.
    """
    rungs = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4097, 32)]
    return (*(n for n in rungs if n < max_rows), max_rows)


def shared_ladder(max_rows: int, fewest: int) -> tuple[int, ...]:
    """Returns the captured batch sizes of passes with shared reads: ``fewest`` and its doubles, and ``max_rows``."""
    rungs = []
    while fewest < max_rows:
        rungs.append(fewest)
        fewest *= 2
    return (*rungs, max_rows)


class PassGraphs:
    """The graphs of the pass ``name``. ``body`` enqueues one pass of a variant on the current stream and does not wait.
    ``fewest_shared``: the fewest rows of a pass with shared reads; None if there are no such passes. ``adapters``: rows
    may have adapters."""

    def __init__(
        self,
        name: str,
        body: Callable[[Variant], None],
        max_rows: int,
        *,
        stream: torch.cuda.Stream | None,
        fewest_shared: int | None = None,
        adapters: bool = False,
    ) -> None:
        self._name, self._body, self._stream = name, body, stream
        shares = fewest_shared is not None and fewest_shared <= max_rows
        self._rungs = {
            False: ladder(max_rows),
            True: shared_ladder(max_rows, fewest_shared) if shares and fewest_shared else (),
        }
        self._adapters = tuple(RowAdapters) if adapters else (RowAdapters.NONE,)
        self.graphs: dict[Variant, torch.cuda.CUDAGraph] = {}

    @property
    def variants(self) -> list[Variant]:
        """All variants, the largest first, so that smaller graphs reuse the memory of larger ones."""
        return [
            Variant(rows, greedy, spatial, shared, adapters)
            for shared, rungs in self._rungs.items()
            for rows in reversed(rungs)
            for adapters in self._adapters
            for greedy in (True, False)
            for spatial in (True, False)
        ]

    def padded(self, num_rows: int, *, shared: bool = False) -> int:
        """Returns the captured batch size for ``num_rows``."""
        rungs = self._rungs[shared]
        return rungs[bisect.bisect_left(rungs, num_rows)]

    def capture(self, progress: Progress | None = None) -> None:
        """Runs and captures every variant, which compiles missing kernels. Requires a CUDA device."""
        variants = self.variants
        pool = torch.cuda.graph_pool_handle()
        for index, variant in enumerate(variants):
            self.graphs[variant] = captured(partial(self._body, variant), self._stream, pool)
            if progress is not None:
                progress(index + 1, len(variants), f"{self._name} graph of {variant.num_rows} rows")

    def warm_up(self) -> None:
        """Runs every variant without capturing it; compiles what is not compiled yet."""
        for variant in self.variants:
            self._body(variant)

    def run(self, variant: Variant) -> None:
        """Runs a variant, whose ``num_rows`` is a captured batch size."""
        graph = self.graphs.get(variant)
        if graph is None:
            self._body(variant)
        else:
            graph.replay()

    def clear(self) -> None:
        self.graphs.clear()
