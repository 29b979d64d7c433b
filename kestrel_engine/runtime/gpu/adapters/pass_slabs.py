"""PassSlabs: the slabs that the rows of a pass use, as its kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.adapters.slabs import MOST_SLABS, RowSlabs, distance
from ....types.adapter import Adapter
from ..state.staging import Field, RowBuffers
from .layout import ATTENTION, EXPERTS, KINDS, MLP, PROJ_INPUT


def row_fields(kinds: Sequence[str]) -> dict[str, Field]:
    """Returns for each row and kind its first slab and its number of slabs."""
    return {f"{what} {kind}": Field(np.int32) for kind in kinds for what in ("first", "count")}


@dataclass(frozen=True, slots=True)
class PassAdapters:
    """The slabs of a pass's rows, by kind. ``attention``, ``proj_input``: None if no row has such slabs, so that the
    pass launches nothing for them."""

    mlp: RowSlabs
    experts: RowSlabs
    attention: RowSlabs | None
    proj_input: RowSlabs | None

    def at(self, rows: Tensor) -> PassAdapters:
        """Those of ``rows`` [n] int64."""
        kinds = self.mlp, self.experts, self.attention, self.proj_input
        mlp, experts, *others = (None if each is None else each.at(rows) for each in kinds)
        assert mlp is not None and experts is not None
        return PassAdapters(mlp, experts, *others)

    @property
    def num_rows(self) -> int:
        return len(self.mlp.first)


@dataclass(slots=True, eq=False)
class Places:
    """Where the slabs of a pass are: the distances of all ``slabs``, kind by kind, each adapter's once, and ``rows``,
    for each of `row_fields` a number for each row."""

    slabs: list[int]
    rows: dict[str, list[int]]

    @classmethod
    def of(
        cls, adapters: Sequence[Adapter | None], anchor: Tensor, kinds: Sequence[str] = KINDS
    ) -> Places:
        """Those of rows with ``adapters``."""
        made = cls([], {name: [0] * len(adapters) for name in row_fields(kinds)})
        for kind in kinds:
            firsts, counts = made.rows[f"first {kind}"], made.rows[f"count {kind}"]
            begins: dict[int, int] = {}
            for row, adapter in enumerate(adapters):
                own = None if adapter is None else adapter.slabs.get(kind)
                if own is None:
                    continue
                assert len(own) <= MOST_SLABS, f"{len(own)} slabs of adapter {adapter}"
                begin = begins.setdefault(id(adapter), len(made.slabs))
                if begin == len(made.slabs):
                    made.slabs += [distance(slab, anchor) for slab in own]
                firsts[row], counts[row] = begin, len(own)
        return made

    def repeated(self, sizes: Sequence[int]) -> Places:
        """Those of a pass in which each row stands for so many."""
        return Places(
            self.slabs,
            {name: np.repeat(each, sizes).tolist() for name, each in self.rows.items()},
        )


def changing_attention(adapters: Sequence[Adapter | None]) -> bool:
    """Returns whether one of ``adapters`` changes a layer of the decoder that is not of an MLP."""
    kinds = ATTENTION, PROJ_INPUT
    return any(each is not None and kind in each.slabs for each in adapters for kind in kinds)


def pass_adapters(
    anchor: Tensor, slabs: Tensor, rows: dict[str, Tensor], *, attention: bool
) -> PassAdapters:
    """Returns the kernels' arguments. ``rows``: the fields of `row_fields` on the device. ``attention``: a row may have
    an adapter that changes more than MLPs."""

    def of(kind: str) -> RowSlabs:
        return RowSlabs(anchor, slabs, rows[f"first {kind}"], rows[f"count {kind}"])

    others = [of(kind) if attention else None for kind in (ATTENTION, PROJ_INPUT)]
    return PassAdapters(of(MLP), of(EXPERTS), *others)


def new_anchor(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what the kernels measure the places of slabs from."""
    return torch.zeros(1, dtype=dtype, device=device)


class PassSlabs:
    """Fixed arrays for captured passes of up to ``max_rows`` rows with up to ``max_adapters`` adapters, for slabs of
    ``kinds``. The caller keeps the adapters of a pass until it has run."""

    def __init__(
        self,
        anchor: Tensor,
        max_rows: int,
        max_adapters: int,
        device: torch.device,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self._anchor, self._kinds = anchor, kinds
        self._rows = RowBuffers(row_fields(kinds), max_rows, device)
        most = max_adapters * MOST_SLABS * len(kinds)
        self._slabs = RowBuffers({"slabs": Field(np.int64)}, most, device)
        self._sent: tuple[list[int], dict[str, list[int]], int] | None = None

    def send(
        self,
        adapters: Sequence[Adapter | None],
        padded: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Enqueues the copy for rows with ``adapters``, and rows of padding up to ``padded``, unless the device has it
        already. ``sizes``: how many rows each adapter applies to; None for one each."""
        places = Places.of(adapters, self._anchor, self._kinds)
        if sizes is not None:
            places = places.repeated(sizes)
        wanted = places.slabs, places.rows, padded
        if wanted == self._sent:
            return
        self._sent = wanted
        host = self._rows.host()
        for name, values in places.rows.items():
            host[name][: len(values)] = values
            host[name][len(values) : padded] = 0
        self._rows.send()
        self._slabs.host()["slabs"][: len(places.slabs)] = places.slabs
        self._slabs.send()

    def kind(self, kind: str, num_rows: int) -> RowSlabs:
        """Returns the slabs of one kind for a pass of ``num_rows`` rows, padding included."""
        first, count = (
            self._rows.device[f"{what} {kind}"][:num_rows] for what in ("first", "count")
        )
        return RowSlabs(self._anchor, self._slabs.device["slabs"], first, count)

    def of(self, num_rows: int, *, attention: bool = True) -> PassAdapters:
        """Returns the kernels' arguments for a pass of the text decoder, of ``num_rows`` rows, padding included.
        ``attention``: as for `pass_adapters`."""
        rows = {name: each[:num_rows] for name, each in self._rows.device.items()}
        slabs = self._slabs.device["slabs"]
        return pass_adapters(self._anchor, slabs, rows, attention=attention)
