"""gRPC-Web: the methods of kestrel.v1 for programs in a browser, which cannot send gRPC itself.

The protocol (gRPC's document "gRPC Web"): the body of a request is one frame with a message. The body of a response is
a frame for each message, then a frame with the trailers, which hold the status. A frame is a byte of flags, the length
in four bytes, and the content. The HTTP status is always 200.

A browser sends one message in a call, so the methods that take a stream of messages are left out. So is AdminService.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf import message_factory

from kestrel_engine import InvalidRequest

from ...edge.calls.call import Call
from ...edge.failures.errors import UnsupportedBody
from ...edge.failures.statuses import status_of
from ..context import Scope
from ..edge import Endpoint, Endpoints, ServiceCall
from ..forms import ByteResponse, ErrorResponse
from ..refusals import Rename
from ..services import HttpServices
from .envelopes import envelope, parse_proto, take_head

_TYPE = b"application/grpc-web+proto"
_TYPES = (_TYPE, b"application/grpc-web")
_MESSAGE, _TRAILERS = 0, 0x80
"""Flags of a frame. Another bit means a compressed message."""
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_LITERAL = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""The characters that stand for themselves in grpc-message."""


def endpoints(services: HttpServices, largest: int) -> Endpoints:
    """``largest``: limit on the bytes of a message."""
    return {
        ("POST", path): _endpoint(path, method, behaviour, largest)
        for path, method, behaviour in services.methods()
        if not method.client_streaming
    }


def _endpoint(path: str, method: Any, behaviour: Any, largest: int) -> Endpoint:
    kind = message_factory.GetMessageClass(method.input_type)
    events = _frames if method.server_streaming else None

    def read(scope: Scope, body: bytearray) -> ServiceCall:
        return ServiceCall(_message(kind(), largest, scope, body), behaviour, _whole, events)

    return Endpoint(path, read, types=_TYPES, form=_Form(), is_raw=True, timeout_s=_timeout_s)


def _message(message: Any, largest: int, scope: Scope, body: bytearray) -> Any:
    """``message``, with what the body of a request holds. Raises InvalidRequest, MessageTooLarge."""
    headers = dict(scope["headers"])
    if b"grpc-timeout" in headers and _timeout_s(scope) is None:
        raise InvalidRequest("", "the header grpc-timeout must be 1 to 8 digits and a unit")
    if take_head(body, "frame", largest) != _MESSAGE:
        raise InvalidRequest("", "the message is compressed; this port takes plain messages")
    parse_proto(body, message)
    return message


class _Form:
    """Errors as trailers."""

    stream_type = _TYPE

    @property
    def ending(self) -> bytes:
        return _trailers(grpc.StatusCode.OK, "", ())

    def error_response(self, error: Exception, call: Call, rename: Rename) -> ErrorResponse:
        frame = _trailers(*status_of(error, call.request_id))
        status = 415 if isinstance(error, UnsupportedBody) else 200
        return ErrorResponse(status, ByteResponse(frame, _TYPE), frame)


def _frames(message: Any) -> Iterable[bytes]:
    yield envelope(_MESSAGE, message.SerializeToString())


def _whole(response: Any) -> ByteResponse:
    trailers = _trailers(grpc.StatusCode.OK, "", ())
    return ByteResponse(envelope(_MESSAGE, response.SerializeToString()) + trailers, _TYPE)


def _trailers(
    code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]]
) -> bytes:
    lines = [("grpc-status", str(code.value[0])), ("grpc-message", quote(message, safe=_LITERAL))]
    for key, value in trailers:
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        lines.append((key, value))
    return envelope(_TRAILERS, "".join(f"{key}: {value}\r\n" for key, value in lines).encode())


def _timeout_s(scope: Scope) -> float | None:
    """The deadline of a call; None if it has none, or an invalid one."""
    given = dict(scope["headers"]).get(b"grpc-timeout")
    found = None if given is None else _TIMEOUT.fullmatch(given)
    return None if found is None else int(found[1]) * _SECONDS[found[2]]
