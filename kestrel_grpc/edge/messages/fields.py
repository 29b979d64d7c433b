"""What the fields of a request say: their paths in errors, single values, and the options that all requests have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from google.protobuf.message import Message

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import FieldPath, InvalidRequest, RequestError, checked_adapter_name

from ...security.identity.principal import Principal, Scope
from ..calls.call import NO_OPTIONS, Call, CallOptions, valid_request_id

_MOST_SALT_BYTES = 128
_MOST_NAME = 512
_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: "normal",
    common_pb2.PRIORITY_LOW: "low",
    common_pb2.PRIORITY_NORMAL: "normal",
    common_pb2.PRIORITY_HIGH: "high",
}


class _Located(AbstractContextManager[None]):
    """One that is made from a generator takes four times as long."""

    __slots__ = ("_place",)

    def __init__(self, place: Callable[[FieldPath], FieldPath]) -> None:
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError):
            raise error.at(self._place(error.path)) from error


def located(place: Callable[[FieldPath], FieldPath]) -> AbstractContextManager[None]:
    """Raises a RequestError of the block with the path that ``place`` returns for its own: the engine names its
    arguments, and a reader of a message the fields of this message."""
    return _Located(place)


def inside(*outer: str | int) -> AbstractContextManager[None]:
    """As ``located``, for fields of what ``outer`` is the path of."""
    return _Located(lambda path: (*outer, *path))


def known_value(name: str | FieldPath, number: int, enum: Any, meanings: Mapping[Any, Any]) -> Any:
    """The meaning of an enum's number. Raises InvalidRequest for a number that this version does not define."""
    if number not in meanings:
        raise InvalidRequest(name, f"{number} is not a value of {enum.DESCRIPTOR.name}")
    return meanings[number]


def in_range(
    message: Any, name: str, least: int, most: int, default: int, outer: FieldPath = ()
) -> int:
    """The value of an optional field. ``outer``: the path of ``message``. Raises InvalidRequest."""
    if not message.HasField(name):
        return default
    value: int = getattr(message, name)
    if not least <= value <= most:
        raise InvalidRequest((*outer, name), f"is {value}; must be {least} to {most}")
    return value


def meant_float(value: float) -> float:
    """The number that the caller meant: 0.1 for the float32 next to it."""
    return float(str(np.float32(value)))


def checked_model_name(name: str) -> str:
    """Returns a name that a model may have. Raises InvalidRequest."""
    if not 1 <= len(name) <= _MOST_NAME:
        raise InvalidRequest("model", f"must have 1 to {_MOST_NAME} characters")
    return name


def own_id(request: Any) -> str | None:
    """The id in a request of the Open Inference Protocol, if it is one that logs can hold; otherwise None."""
    is_own = "id" in _names_of(request.__class__) and valid_request_id(request.id)
    return request.id if is_own else None


def request_options(request: Any) -> Any:
    """The options of a request, to change them; None if its type has none. Those of frames are in the stream's first
    message."""
    names = request.DESCRIPTOR.fields_by_name
    if "config" in names:
        return request.config.options if request.HasField("config") else None
    return request.options if "options" in names else None


def take_options(call: Call) -> None:
    """Gives the call the options of its message, and the id that the message chooses, if it chooses one. Raises
    InvalidRequest, ScopeMissing."""
    message = call.message
    if "options" not in _names_of(message.__class__):
        call.request_id = own_id(message) or call.request_id
        return
    if not message.HasField("options"):
        return
    options = message.options
    if options.HasField("request_id"):
        if not valid_request_id(options.request_id):
            raise InvalidRequest(
                ("options", "request_id"), "must be 1 to 128 visible ASCII characters (! to ~)"
            )
        call.request_id = options.request_id
    call.options = call_options(options, call.principal)


def call_options(
    options: common_pb2.RequestOptions, caller: Principal, path: FieldPath = NO_OPTIONS.path
) -> CallOptions:
    """Reads options. ``path``: as in CallOptions. Raises InvalidRequest, and ScopeMissing if ``caller`` may not ask for
    the priority."""
    with inside(*path):
        priority = known_value("priority", options.priority, common_pb2.Priority, _PRIORITIES)
        if priority == "high":
            caller.check(Scope.HIGH)
        model = checked_model_name(options.model) if options.HasField("model") else None
        salt = options.cache_salt
        if (size := len(salt.encode())) > _MOST_SALT_BYTES:
            raise InvalidRequest(
                "cache_salt", f"has {size} UTF-8 bytes; the limit is {_MOST_SALT_BYTES}"
            )
        adapter = checked_adapter_name(options.adapter) if options.HasField("adapter") else None
    return CallOptions(model, priority, salt, adapter, path)


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    """The names of a message's fields; none for a list of messages. Each look at a descriptor makes new objects."""
    return frozenset(kind.DESCRIPTOR.fields_by_name) if issubclass(kind, Message) else frozenset()
