"""Conversions of the messages of Embed and StreamEmbed: pure functions, as in tasks.py and responses.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, Request

from ...edge.messages.fields import known_value

_REST_BYTES = 16 * 1024
"""Room in a message for all but the numbers."""

_PARTS = {
    pb.EMBEDDING_PARTS_UNSPECIFIED: (True, False),
    pb.EMBEDDING_PARTS_IMAGE: (True, False),
    pb.EMBEDDING_PARTS_CROPS: (False, True),
    pb.EMBEDDING_PARTS_IMAGE_AND_CROPS: (True, True),
}
"""Whether the whole image, and whether each crop, has an embedding."""
_POOLINGS = {
    pb.EMBEDDING_POOLING_UNSPECIFIED: "mean",
    pb.EMBEDDING_POOLING_MEAN: "mean",
    pb.EMBEDDING_POOLING_NONE: "none",
}
_DTYPES = {
    pb.EMBEDDING_DTYPE_UNSPECIFIED: "float32",
    pb.EMBEDDING_DTYPE_FLOAT32: "float32",
    pb.EMBEDDING_DTYPE_FLOAT16: "float16",
}
_NAMES = {np.dtype(name): number for number, name in _DTYPES.items()}
"""Of two numbers of a type, the last one."""
_WHOLE = (0.0, 0.0, 1.0, 1.0)


def embed_requests(
    task: pb.EmbedTask, max_message_bytes: int | None, *, streamed: bool
) -> list[Request]:
    """Raises InvalidRequest. ``streamed``: the limit is on each embedding, not on all together."""
    whole_image, crops = known_value("parts", task.parts, pb.EmbeddingParts, _PARTS)
    arguments: dict[str, Any] = {
        "pooling": known_value("pooling", task.pooling, pb.EmbeddingPooling, _POOLINGS),
        "dtype": known_value("dtype", task.dtype, pb.EmbeddingDtype, _DTYPES),
        "whole_image": whole_image,
        "crops": crops,
        "one_by_one": streamed,
    }
    if max_message_bytes is not None:
        arguments["max_bytes"] = max_message_bytes - _REST_BYTES
    return [Request(skill="embed", arguments=arguments)]


def embeddings(result: EngineResult) -> Iterator[pb.Embedding]:
    """The embeddings one by one: of the whole image, then of the crops."""
    whole, crops = result.output["image"], result.output["crops"]
    if whole is not None:
        yield _embedding(whole, _WHOLE)
    if crops is not None:
        for number, (vectors, box) in enumerate(zip(crops, result.output["boxes"], strict=True)):
            yield _embedding(vectors, box, number)


def _embedding(
    vectors: np.ndarray, box: tuple[float, float, float, float], crop: int | None = None
) -> pb.Embedding:
    """``vectors``: [dim] or [patches, dim]."""
    x_min, y_min, x_max, y_max = box
    rows = vectors[None] if vectors.ndim == 1 else vectors
    return pb.Embedding(
        data=rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes(),
        rows=rows.shape[0],
        dimensions=rows.shape[1],
        dtype=_NAMES[rows.dtype],
        box=common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max),
        crop=crop,
    )
