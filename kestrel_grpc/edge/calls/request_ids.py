"""Checks request ids that callers choose."""

from __future__ import annotations

import functools
import re
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import InvalidRequest

_VALID = re.compile(r"[!-~]{1,128}")


def id_from_options(options: common_pb2.RequestOptions) -> str | None:
    """The caller's request id; None if the options do not set it. Raises InvalidRequest."""
    if not options.HasField("request_id"):
        return None
    if not valid_request_id(options.request_id):
        raise InvalidRequest(
            ("options", "request_id"), "must be 1 to 128 visible ASCII characters (! to ~)"
        )
    return options.request_id


def own_id(request: Any) -> str | None:
    """The id in a request of the Open Inference Protocol, if it is one that logs can hold; otherwise None."""
    kind: Any = type(request)
    return request.id if _has_id(kind) and valid_request_id(request.id) else None


@functools.cache
def _has_id(kind: Any) -> bool:
    descriptor = getattr(kind, "DESCRIPTOR", None)  # Several messages are a list.
    return descriptor is not None and "id" in descriptor.fields_by_name


def valid_request_id(text: str) -> bool:
    return _VALID.fullmatch(text) is not None
