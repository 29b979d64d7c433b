"""What the edge takes from a request's options: the id that the caller chose, and the priority that it asks for."""

from __future__ import annotations

import functools
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2

from ...security.identity.principal import Principal, Scope
from ..calls.call import Call
from ..calls.request_ids import id_from_options, own_id


def options_of(request: Any) -> common_pb2.RequestOptions | None:
    """The options of a request; None if it has none. ``request``: a message, or a list of them, which has none."""
    kind: Any = type(request)
    return request.options if _has(kind, "options") and request.HasField("options") else None


def request_options(request: Any) -> Any:
    """The options of a request, to change them; None if its type has none. Those of frames are in the stream's first
    message."""
    names = request.DESCRIPTOR.fields_by_name
    if "config" in names:
        return request.config.options if request.HasField("config") else None
    return request.options if "options" in names else None


def take_id(call: Call, options: common_pb2.RequestOptions | None) -> None:
    """Gives the call the id that its message chooses, if it chooses one. Raises InvalidRequest."""
    chosen = own_id(call.message) if options is None else id_from_options(options)
    call.request_id = chosen or call.request_id


def check_priority(options: common_pb2.RequestOptions | None, principal: Principal) -> None:
    """Raises ScopeMissing."""
    if options is not None and options.priority == common_pb2.PRIORITY_HIGH:
        principal.check(Scope.HIGH)


@functools.cache
def _has(kind: Any, field: str) -> bool:
    descriptor = getattr(kind, "DESCRIPTOR", None)
    return descriptor is not None and field in descriptor.fields_by_name
