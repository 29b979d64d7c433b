"""What a request for embeddings asks of the runtime, and what comes back.

The embedding of an image is what the decoder reads in its place: for each of grid x grid patches, the projected
features of the overview crop and of the pooled tiles (moondream.md section 4). The embedding of a crop is that of the
crop as an image of its own. A pooled embedding is the mean over the patches, divided by its Euclidean length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .reading import ReadSpec

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class EmbeddingSpec(ReadSpec):
    """Which embeddings of an image to return, and in which form."""

    patches: bool = False
    """One vector a patch, in place of one pooled vector."""
    half: bool = False
    """Numbers in float16, in place of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Embeddings of one image, float32 or float16. ``image``: [dim], or [patches, dim]; None if not requested.
    ``crops``: [num_crops, dim], or [num_crops, patches, dim]; None if not requested."""

    image: np.ndarray | None
    crops: np.ndarray | None
