"""What requests read of encoded images, on its way to the host: one function for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..types.embedding import EmbeddingSpec
from ..types.reading import ReadSpec
from . import embedding


class PendingReading(Protocol):
    """Copies that are valid once the device has executed them."""

    @property
    def is_finite(self) -> bool: ...

    def value(self) -> Any:
        """What the request gets."""
        ...


_KINDS: dict[type[ReadSpec], Callable[[Any, Tensor | None, Tensor | None], PendingReading]] = {
    EmbeddingSpec: embedding.fetch
}


def fetch(spec: ReadSpec, image: Tensor | None, crops: Tensor | None) -> PendingReading:
    """Enqueues the copies. ``image`` [patches, dim] and ``crops`` [num_crops, patches, dim]: projected features, each
    None if ``spec`` does not read it."""
    return _KINDS[type(spec)](spec, image, crops)
