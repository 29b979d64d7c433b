"""Refusal: an error as an HTTP response. Owns the table of HTTP statuses for gRPC's codes, and the form of error
bodies.

The body is the one that OpenAI's and Moondream's clients parse: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

import kestrel_engine as engine
from kestrel_engine import FieldPath

from ..edge.failures.errors import ModelNotReady
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """``retry_after_s``: None if the same request would fail again."""

    status: int
    body: dict[str, Any]
    retry_after_s: float | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after_s is None:
            return []
        seconds = str(max(1, math.ceil(self.retry_after_s))).encode()
        milliseconds = str(round(1000 * self.retry_after_s)).encode()
        return [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]


def refusal(
    error: BaseException, complaint: Complaint, rename: Rename = lambda path: path
) -> Refusal:
    """Converts an error to a response."""
    status, kind = _STATUSES.get(complaint.code, _INTERNAL)
    status = _OWN_STATUS.get(complaint.reason, status)
    message, param = complaint.message, None
    if complaint.path:
        param = shown_path(rename(complaint.path))
        message = f"{param}: {complaint.description}"
    retry_after_s = None
    if isinstance(error, engine.EngineOverloaded):
        retry_after_s = error.retry_after_s
    elif isinstance(error, (ModelNotReady, engine.EngineClosed)):
        retry_after_s = _STARTING_S
    body = {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": complaint.reason.lower(),
        }
    }
    return Refusal(status, body, retry_after_s)
