"""PassSlabs: tells the kernels of a pass which slabs its rows use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....kernels.adapters.slabs import MOST_SLABS, RowSlabs, distance
from ....types.adapter import Adapter
from ..state.staging import Field, RowBuffers


def new_anchor(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what the kernels measure the places of slabs from."""
    return torch.zeros(1, dtype=dtype, device=device)


def places_of(
    adapters: Sequence[Adapter | None], anchor: Tensor
) -> tuple[list[int], list[int], list[int]]:
    """Returns the distances of all slabs of ``adapters``, each adapter once, and for each entry its first slab and its
    number of slabs."""
    slabs: list[int] = []
    begins: dict[int, int] = {}
    first, count = [], []
    for adapter in adapters:
        if adapter is None:
            first.append(0)
            count.append(0)
            continue
        assert adapter.slabs is not None, f"adapter {adapter.name} has no slabs"
        begin = begins.setdefault(id(adapter), len(slabs))
        if begin == len(slabs):
            slabs += [distance(slab, anchor) for slab in adapter.slabs]
        first.append(begin)
        count.append(len(adapter.slabs))
    return slabs, first, count


class PassSlabs:
    """Fixed arrays for captured passes of up to ``max_rows`` rows with up to ``max_adapters`` adapters. The caller
    keeps the adapters of a pass until it has run."""

    def __init__(
        self, anchor: Tensor, max_rows: int, max_adapters: int, device: torch.device
    ) -> None:
        self._anchor = anchor
        fields = {"first": Field(np.int32), "count": Field(np.int32)}
        self._rows = RowBuffers(fields, max_rows, device)
        self._slabs = RowBuffers({"slabs": Field(np.int64)}, max_adapters * MOST_SLABS, device)
        self._sent: tuple[list[int], list[int], list[int], int] | None = None

    def send(
        self,
        adapters: Sequence[Adapter | None],
        padded: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Enqueues the copy for rows with ``adapters``, and rows of padding up to ``padded``, unless the device has it
        already. ``sizes``: how many rows each adapter applies to; None for one each."""
        slabs, first, count = places_of(adapters, self._anchor)
        if sizes is not None:
            first, count = (np.repeat(each, sizes).tolist() for each in (first, count))
        wanted = slabs, first, count, padded
        if wanted == self._sent:
            return
        self._sent = wanted
        host = self._rows.host()
        for name, values in (("first", first), ("count", count)):
            host[name][: len(values)] = values
            host[name][len(values) : padded] = 0
        self._rows.send()
        self._slabs.host()["slabs"][: len(slabs)] = slabs
        self._slabs.send()

    def of(self, num_rows: int) -> RowSlabs:
        """Returns the kernels' arguments for a pass of ``num_rows`` rows, padding included."""
        rows, slabs = self._rows.device, self._slabs.device["slabs"]
        return RowSlabs(self._anchor, slabs, rows["first"], rows["count"]).of(num_rows)
