"""Adapter: a fine-tune that is loaded beside a model's weights. Scheduler and skills pass it on and look at its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

INPUT = "@input"
"""Ends the name of a change that reads the normalised input of the block, and not the input of its own layer."""


class Change(Protocol):
    """The low-rank change of one module (models.low_rank.LowRank). ``a``: [rank, in]. ``b``: [out, rank]. For experts
    both have a first dimension more."""

    @property
    def a(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the change [..., out] of a layer's result for ``x`` [..., in]."""
        ...

    def expert(self, index: int, x: Tensor) -> Tensor:
        """As a call, for one of the experts."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. ``key``: a hash of its content, by which prefixes are kept apart. ``weights``: its change of
    each module, by the module's canonical name. ``num_bytes``: the memory of its tensors. ``slabs``: the same changes
    in the form that kernels read, by kind (runtime.gpu.adapters.layout). An adapter has either; for tests, both."""

    name: str
    key: str
    weights: Mapping[str, Change] = field(repr=False)
    num_bytes: int
    slabs: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def changes_vision(self) -> bool:
        """Whether the embeddings of images depend on this adapter."""
        return self._changes("vision.")

    @property
    def changes_tower(self) -> bool:
        """Whether the features of crops depend on this adapter, too, and not only what the projector makes of them."""
        return self._changes("vision.blocks.")

    def _changes(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in (*self.weights, *self.slabs))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCounts:
    """The adapters of an engine at one instant, and counts since it started."""

    loaded: tuple[str, ...] = ()
    """Names of those in the memory of the device, the most recently used first."""
    loading: tuple[str, ...] = ()
    """Names of those that are being loaded."""
    used: int = 0
    """How many of the loaded ones requests use."""
    most: int = 0
    """How many adapters of the size of the largest one fit; before there is one, of rank 16 on all MLPs."""
    num_bytes: int = 0
    """Of the device's memory."""
    host_bytes: int = 0
    """Of the host's memory, for adapters that are ready to be copied to the device."""
    loads: int = 0
    failures: int = 0
    """Adapters that could not be loaded."""
