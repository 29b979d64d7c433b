"""Streaming methods take their request in a field: StreamQueryRequest.request is a QueryRequest."""

from __future__ import annotations

import functools
from typing import Any


def inner_request(message: Any) -> Any:
    """The request that ``message`` carries, or ``message`` itself if its type carries none."""
    kind: Any = type(message)
    return message.request if _carries_request(kind) else message


def request_images(request: Any) -> list[Any]:
    """The Image messages that are set in a request, in the order of the prompt. ``request``: not that of a stream."""
    names = request.DESCRIPTOR.fields_by_name
    if "frame" in names:
        return [request.frame.image] if request.frame.HasField("image") else []
    images = [request.image] if "image" in names and request.HasField("image") else []
    if "images" in names:
        for each in (*request.history, request):
            images += each.images
    return images


def request_options(request: Any) -> Any:
    """The options of a request, to change them; None if its type has none. Those of a frame belong to its stream."""
    names = request.DESCRIPTOR.fields_by_name
    if "config" in names and "frame" in names:
        return request.config.options if request.HasField("config") else None
    return request.options if "options" in names else None


@functools.cache
def _carries_request(kind: Any) -> bool:
    descriptor = getattr(kind, "DESCRIPTOR", None)  # An upload's parts are no message.
    return descriptor is not None and "request" in descriptor.fields_by_name
