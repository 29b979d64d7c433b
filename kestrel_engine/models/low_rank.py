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


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of one linear layer. ``a``: [rank, in]. ``b``: [out, rank]. For experts both have a first dimension
    more, [experts, rank, in] and [experts, out, rank]."""

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the change [..., out] of a layer's result for ``x`` [..., in]."""
        return F.linear(F.linear(x, self.a), self.b)

    def expert(self, index: int, x: Tensor) -> Tensor:
        """As a call, for one of the experts."""
        return F.linear(F.linear(x, self.a[index]), self.b[index])


Changes: TypeAlias = Mapping[str, LowRank]
"""An adapter: the change of each module, by the module's canonical name."""


class Adapters(Protocol):
    """The adapters of a batch, for a linear layer."""

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """Adds the changes of ``module`` for its input ``x`` to its result ``y``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class OneAdapter:
    """One adapter for all rows of a batch, whatever its shape [..., in]."""

    changes: Changes

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """As ``Adapters.add_``."""
        change = self.changes.get(module)
        if change is not None:
            y.add_(change(x))


@dataclass(frozen=True, slots=True, eq=False)
class TokenAdapters:
    """The adapters of a batch. ``pieces``: for each adapter, the indices [n] int64 of its tokens. A token has one
    adapter or none."""

    pieces: tuple[tuple[Tensor, Changes], ...]

    def add_(self, module: str, x: Tensor, y: Tensor) -> None:
        """Adds the changes of ``module`` for its input ``x`` [num_tokens, in] to its result ``y`` [num_tokens, out]."""
        for tokens, changes in self.pieces:
            change = changes.get(module)
            if change is not None:
                y.index_add_(0, tokens, change(x[tokens]))

    def of(self, tokens: Tensor) -> TokenAdapters:
        """The adapters of a batch that consists of ``tokens`` [n] int64 of this one. An index may occur repeatedly."""
        pieces = []
        for own, changes in self.pieces:
            places = torch.isin(tokens, own).nonzero().flatten()
            if len(places):
                pieces.append((places, changes))
        return TokenAdapters(tuple(pieces))

    def add_expert_(self, module: str, index: int, x: Tensor, y: Tensor) -> None:
        """As ``add_``, for one of the experts of ``module``."""
        for tokens, changes in self.pieces:
            change = changes.get(module)
            if change is not None:
                y.index_add_(0, tokens, change.expert(index, x[tokens]))


def token_adapters(
    rows: Sequence[tuple[int, Changes | None]], device: torch.device
) -> TokenAdapters | None:
    """Returns the adapters of a batch of ``rows``, each a number of tokens and an adapter; None if no row has one."""
    tokens: dict[int, list[Tensor]] = {}
    found: dict[int, Changes] = {}
    begin = 0
    for count, changes in rows:
        if changes is not None:
            found[id(changes)] = changes
            tokens.setdefault(id(changes), []).append(torch.arange(begin, begin + count))
        begin += count
    if not found:
        return None
    return TokenAdapters(tuple((torch.cat(tokens[i]).to(device), found[i]) for i in found))
