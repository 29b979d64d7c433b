"""Streaming methods take their request in a field: StreamQueryRequest.request is a QueryRequest."""

from __future__ import annotations

import functools
from typing import Any


def inner_request(message: Any) -> Any:
    """The request that ``message`` carries, or ``message`` itself if its type carries none."""
    kind: Any = type(message)
    return message.request if _carries_request(kind) else message


@functools.cache
def _carries_request(kind: Any) -> bool:
    descriptor = getattr(kind, "DESCRIPTOR", None)  # An upload's parts are no message.
    return descriptor is not None and "request" in descriptor.fields_by_name
