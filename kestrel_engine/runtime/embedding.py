"""Embeddings in the form in which requests get them: pooled or by patch, in float32 or float16, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types.embedding import Embedding, EmbeddingSpec


@dataclass(frozen=True, slots=True, eq=False)
class FetchedEmbedding:
    """Embeddings on the way to the host. They are valid once the device has executed the copies."""

    image: Tensor | None
    crops: Tensor | None
    finite: Tensor
    """A bool: all numbers are finite."""

    @property
    def is_finite(self) -> bool:
        return bool(self.finite)

    def value(self) -> Embedding:
        """The arrays share the tensors' memory."""
        return Embedding(
            image=None if self.image is None else self.image.numpy(),
            crops=None if self.crops is None else self.crops.numpy(),
        )


def fetch(spec: EmbeddingSpec, image: Tensor | None, crops: Tensor | None) -> FetchedEmbedding:
    """Enqueues the copies. ``image`` [patches, dim] and ``crops`` [num_crops, patches, dim]: projected features, each
    None if ``spec`` does not ask for it."""
    found = [None if each is None else _formatted(each, spec) for each in (image, crops)]
    finite = torch.stack([torch.isfinite(each).all() for each in found if each is not None]).all()
    copies = [None if each is None else on_host(each) for each in found]
    return FetchedEmbedding(copies[0], copies[1], on_host(finite))


def pooled(vectors: Tensor) -> Tensor:
    """Returns the mean of ``vectors`` [..., patches, dim] over the patches, divided by its Euclidean length: [..., dim]
    float32."""
    return F.normalize(vectors.float().mean(dim=-2), dim=-1)


def _formatted(vectors: Tensor, spec: EmbeddingSpec) -> Tensor:
    wanted = torch.float16 if spec.half else torch.float32
    return (vectors if spec.patches else pooled(vectors)).to(wanted)


def on_host(source: Tensor) -> Tensor:
    """Enqueues a copy."""
    # A copy also on a CPU: the runtime may keep the source.
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return host.copy_(source, non_blocking=True)
