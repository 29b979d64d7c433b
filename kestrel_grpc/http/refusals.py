"""An error as an HTTP response. Owns the table of HTTP statuses for gRPC's codes, and the form of error bodies.

The body is the one that OpenAI's and Moondream's clients parse: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import grpc

import kestrel_engine as engine
from kestrel_engine import FieldPath

from ..edge.failures.errors import ModelNotReady, UnsupportedBody
from ..edge.failures.statuses import Complaint, shown_path

Rename = Callable[[FieldPath], FieldPath]
"""From the path of a field of kestrel.v1 to that of the client's JSON."""


def renamed(path: FieldPath, names: Mapping[FieldPath, FieldPath]) -> FieldPath:
    """``path``, whose longest beginning that ``names`` has is replaced."""
    for length in range(len(path), 0, -1):
        if path[:length] in names:
            return (*names[path[:length]], *path[length:])
    return path


_Code = grpc.StatusCode
_STATUSES = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, "not_found_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.CANCELLED: (499, "cancelled"),
    _Code.UNIMPLEMENTED: (501, "not_supported_error"),
    _Code.UNAVAILABLE: (503, "service_unavailable"),
    _Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
_INTERNAL = (500, "server_error")
_OWN_STATUS = {"MESSAGE_TOO_LARGE": 413, "SLOW_SENDER": 408, "CONTENT_TYPE_UNSUPPORTED": 415}
_STARTING_S = 1.0


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """``param``: the invalid field."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    error: BaseException, complaint: Complaint, rename: Rename = lambda path: path
) -> tuple[int, dict[str, Any], tuple[tuple[bytes, bytes], ...]]:
    """Status, body and headers of the response that an error becomes."""
    _, kind = _STATUSES.get(complaint.code, _INTERNAL)
    status = _OWN_STATUS.get(complaint.reason, status_of_code(complaint.code))
    message, param = complaint.description, None
    if complaint.path:
        param = shown_path(rename(complaint.path))
        message = f"{param}: {message}"
    return status, error_body(message, kind, complaint.reason.lower(), param), headers_of(error)


def status_of_code(code: grpc.StatusCode) -> int:
    """The HTTP status of a code of gRPC."""
    return _STATUSES.get(code, _INTERNAL)[0]


def headers_of(error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
    """What a response says beside an error: when to try again, or which content types its path takes."""
    if isinstance(error, engine.EngineOverloaded):
        return _retry_after(error.retry_after_s)
    if isinstance(error, (ModelNotReady, engine.EngineClosed)):
        return _retry_after(_STARTING_S)
    if isinstance(error, UnsupportedBody):
        return ((b"accept-post", b", ".join(error.types)),)
    return ()  # The same request would fail again.


def _retry_after(seconds: float) -> tuple[tuple[bytes, bytes], ...]:
    whole = str(max(1, math.ceil(seconds))).encode()
    return (b"retry-after", whole), (b"retry-after-ms", str(round(1000 * seconds)).encode())
