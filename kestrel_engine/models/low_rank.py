"""Low-rank changes of linear layers (LoRA, moondream.md section 11), and which tokens of a batch have which change.

A layer with an adapter gives ``x @ weight.T + bias + (x @ a.T) @ b.T``. The scale of an adapter is a part of ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.adapter import Change


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of one linear layer. ``a``: [rank, in]. ``b``: [out, rank]. Experts add a first dimension to both."""

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the change [..., out] of a layer's result for ``x`` [..., in]."""
        return F.linear(F.linear(x, self.a), self.b)

    def expert(self, index: int, x: Tensor) -> Tensor:
        """As a call, for one of the experts."""
        return F.linear(F.linear(x, self.a[index]), self.b[index])


Changes: TypeAlias = Mapping[str, Change]
"""An adapter: the change of each module, by the module's canonical name."""


class Adapters(Protocol):
    """The adapters of a batch, for a linear layer."""

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """Adds the changes of ``module`` for its input ``x`` to its result ``y``."""
        ...


class TextAdapters(Adapters, Protocol):
    """The adapters of a batch of tokens, for the text decoder."""

    def of(self, tokens: Tensor) -> TextAdapters:
        """The adapters of a batch that consists of ``tokens`` [n] int64 of this one. An index may occur repeatedly."""
        ...

    def add_expert_(self, module: str, index: int, x: Tensor, y: Tensor) -> None:
        """As ``add_``, for one of the experts of ``module``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class OneAdapter:
    """One adapter for all rows of a batch, whatever its shape [..., in]."""

    changes: Changes

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        change = self.changes.get(module)
        if change is not None:
            y.add_(change(x))


class TokenAdapters:
    """The adapters of a batch. A token has one adapter or none."""

    def __init__(
        self, owners: Sequence[int], changes: Sequence[Changes], device: torch.device
    ) -> None:
        """``owners``: for each token the index of its adapter in ``changes``, or -1."""
        self._owners, self._changes, self._device = owners, changes, device
        places: dict[int, list[int]] = {}
        for place, owner in enumerate(owners):
            if owner >= 0:
                places.setdefault(owner, []).append(place)
        # With one adapter for all tokens, nothing is gathered.
        self._pieces = [
            (None if len(own) == len(owners) else torch.tensor(own, device=device), changes[owner])
            for owner, own in places.items()
        ]

    def of(self, tokens: Tensor) -> TokenAdapters:
        owners = [self._owners[token] for token in tokens.tolist()]
        return TokenAdapters(owners, self._changes, self._device)

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """As ``Adapters.add_``. ``x``: [num_tokens, in]. ``y``: [num_tokens, out]."""
        self._add(module, x, y, None)

    def add_expert_(self, module: str, index: int, x: Tensor, y: Tensor) -> None:
        self._add(module, x, y, index)

    def _add(self, module: str, x: Tensor, y: Tensor, expert: int | None) -> None:
        for tokens, changes in self._pieces:
            change = changes.get(module)
            if change is None:
                continue
            own = x if tokens is None else x[tokens]
            delta = change(own) if expert is None else change.expert(expert, own)
            if tokens is None:
                y.add_(delta)
            else:
                y.index_add_(0, tokens, delta)


def token_adapters(
    rows: Sequence[tuple[int, Changes | None]], device: torch.device
) -> TokenAdapters | None:
    """Returns the adapters of a batch of ``rows``, each a number of tokens and an adapter; None if no row has one."""
    found: dict[int, int] = {}
    changes: list[Changes] = []
    owners: list[int] = []
    for count, own in rows:
        owner = -1
        if own is not None:
            owner = found.setdefault(id(own), len(changes))
            if owner == len(changes):
                changes.append(own)
        owners += [owner] * count
    return TokenAdapters(owners, changes, device) if changes else None
