"""Conversions of the messages of Embed and StreamEmbed: pure functions, as those of calls.py and responses.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult

from .calls import SkillCall
from .images import required_image
from .options import call_options
from .responses import timings_message
from .values import known_value

_REST_BYTES = 16 * 1024
"""Room in a message for all but the numbers."""

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
_NAMES = {
    np.dtype("float32"): pb.EMBEDDING_DTYPE_FLOAT32,
    np.dtype("float16"): pb.EMBEDDING_DTYPE_FLOAT16,
}
_WHOLE = (0.0, 0.0, 1.0, 1.0)


def embed_call(
    request: pb.EmbedRequest, max_message_bytes: int | None, *, streamed: bool = False
) -> SkillCall:
    """Raises InvalidRequest. ``streamed``: the limit is on each embedding, not on all together."""
    arguments: dict[str, Any] = {
        "pooling": known_value("pooling", request.pooling, pb.EmbeddingPooling, _POOLINGS),
        "dtype": known_value("dtype", request.dtype, pb.EmbeddingDtype, _DTYPES),
        "crops": request.crops,
        "one_by_one": streamed,
    }
    if request.HasField("whole_image"):
        arguments["whole_image"] = request.whole_image
    if max_message_bytes is not None:
        arguments["max_bytes"] = max_message_bytes - _REST_BYTES
    return SkillCall(
        skill="embed",
        image=required_image(request),
        arguments=arguments,
        settings={},
        options=call_options(request.options),
    )


def embed_response(result: EngineResult, image_positions: int) -> pb.EmbedResponse:
    """The response with all embeddings."""
    response = embed_final(result, image_positions)
    for event in embed_events(result):
        if "whole_image" in event:
            response.whole_image.CopyFrom(event["whole_image"])
        else:
            response.crops.append(event["crop"])
    return response


def embed_final(result: EngineResult, image_positions: int) -> pb.EmbedResponse:
    """The response without embeddings."""
    assert result.image_size is not None, "an embedding has an image"
    width, height = result.image_size
    return pb.EmbedResponse(
        timings=timings_message(result.metrics),
        model=result.model,
        request_id=result.request_id,
        image_size=common_pb2.ImageSize(width=width, height=height),
    )


def embed_events(result: EngineResult) -> Iterator[dict[str, pb.Embedding]]:
    """The embeddings one by one, each under its field's name in StreamEmbedResponse."""
    whole, crops = result.output["image"], result.output["crops"]
    if whole is not None:
        yield {"whole_image": _embedding(whole, _WHOLE)}
    if crops is not None:
        for vectors, box in zip(crops, result.output["boxes"], strict=True):
            yield {"crop": _embedding(vectors, box)}


def _embedding(vectors: np.ndarray, box: tuple[float, float, float, float]) -> pb.Embedding:
    """``vectors``: [dim] or [patches, dim]."""
    x_min, y_min, x_max, y_max = box
    rows = vectors[None] if vectors.ndim == 1 else vectors
    return pb.Embedding(
        data=rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes(),
        rows=rows.shape[0],
        dimensions=rows.shape[1],
        dtype=_NAMES[rows.dtype],
        box=common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max),
    )
