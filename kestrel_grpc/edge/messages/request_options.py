"""What the edge takes from a request's options: the id that the caller chose, and the priority that it asks for."""

from __future__ import annotations

import functools
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import InvalidRequest

from ...security.identity.principal import Principal, Scope
from ..calls.call import Call, valid_request_id


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


def take_options(call: Call) -> None:
    """Gives the call the id that its message chooses, if it chooses one, and checks the priority that it asks for.
    Raises InvalidRequest, ScopeMissing."""
    options = options_of(call.message)
    if options is None:
        call.request_id = own_id(call.message) or call.request_id
        return
    if options.HasField("request_id"):
        if not valid_request_id(options.request_id):
            raise InvalidRequest(
                ("options", "request_id"), "must be 1 to 128 visible ASCII characters (! to ~)"
            )
        call.request_id = options.request_id
    check_priority(options, call.principal)


def own_id(request: Any) -> str | None:
    """The id in a request of the Open Inference Protocol, if it is one that logs can hold; otherwise None."""
    kind: Any = type(request)
    is_own = _has(kind, "id") and valid_request_id(request.id)
    return request.id if is_own else None


def check_priority(options: common_pb2.RequestOptions, principal: Principal) -> None:
    """Raises ScopeMissing."""
    if options.priority == common_pb2.PRIORITY_HIGH:
        principal.check(Scope.HIGH)


@functools.cache
def _has(kind: Any, field: str) -> bool:
    descriptor = getattr(kind, "DESCRIPTOR", None)
    return descriptor is not None and field in descriptor.fields_by_name
