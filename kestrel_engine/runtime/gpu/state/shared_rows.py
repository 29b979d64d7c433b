"""SharedRows: finds the decode rows of a step that share positions, and describes them to the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....kernels.attention.shared_prefix import ROWS, TILE_WIDTH, SharedPrefixes
from ....types.step import Row
from ...shared_beginning import shared_beginnings
from .staging import Field, RowBuffers

FEWEST_ROWS = 8
"""With fewer rows, reading shared positions once saves less than the kernel for it takes."""

FEWEST_OF_A_GROUP = 4
"""The fewest rows that share positions."""


class SharedRows:
    """Owns the fixed inputs and the partial sums of `shared_prefix`, for steps of up to ``max_rows`` rows."""

    def __init__(
        self, max_rows: int, num_heads: int, head_dim: int, page_size: int, device: torch.device
    ) -> None:
        self._page_size = page_size
        self._tiles = RowBuffers(
            {"tiles": Field(np.int32, (TILE_WIDTH,))}, self._num_tiles(max_rows), device
        )
        self._counts = RowBuffers({"counts": Field(np.int32)}, max_rows, device)
        self._all = SharedPrefixes.allocate(
            self._tiles.device["tiles"], self._counts.device["counts"], num_heads, head_dim
        )

    def send(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Enqueues the copy of the tiles for ``rows``. Returns the number of rows of each group; nothing, without a
        copy, if a step without shared reads takes less time."""
        if len(rows) < FEWEST_ROWS:
            return ()
        groups = list(shared_beginnings(rows, self._page_size, at_least=FEWEST_OF_A_GROUP))
        saved = sum(
            (len(g.rows) - _tiles_of(len(g.rows))) * g.num_pages * self._page_size for g in groups
        )
        if 2 * saved < sum(row.start for row in rows):
            return ()
        counts, tiles = self._counts.host()["counts"], self._tiles.host()["tiles"]
        counts[:], tiles[:, 0] = 0, 0
        place, sizes = 0, []
        for group in groups:
            shared = group.num_pages * self._page_size
            if not shared:
                continue
            counts[group.indices] = shared
            sizes.append(len(group.indices))
            for first in range(0, len(group.indices), ROWS):
                part = group.indices[first : first + ROWS]
                tiles[place, : 2 + len(part)] = (len(part), shared, *part)
                place += 1
        self._counts.send()
        self._tiles.send()
        return tuple(sizes)

    def send_nothing(self) -> None:
        """Enqueues the copy of tiles without rows."""
        for buffers in (self._counts, self._tiles):
            for array in buffers.host().values():
                array[:] = 0
            buffers.send()

    def of(self, num_rows: int) -> SharedPrefixes:
        """Returns the kernel's arguments for a pass of ``num_rows`` rows, padding included."""
        return self._all.of(num_rows, self._num_tiles(num_rows))

    @staticmethod
    def _num_tiles(num_rows: int) -> int:
        """Returns the most tiles of a pass. A group has at least as many rows as FEWEST_OF_A_GROUP for each tile."""
        return max(1, num_rows // FEWEST_OF_A_GROUP)


def _tiles_of(num_rows: int) -> int:
    return -(-num_rows // ROWS)
