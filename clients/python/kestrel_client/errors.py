"""The errors of the client.

KestrelError
├── InvalidRequestError       an argument is invalid, nothing was sent (also a ValueError)
│   ├── InvalidImageError     the image can't be read or has an unsupported form
│   └── RequestTooLargeError  the message exceeds the client's limit
├── MissingDependencyError    an optional package is not installed (also an ImportError)
├── IncompleteStreamError     a stream ended with OK but without its result
└── RpcError                  the call ended with a status other than OK
    ├── InvalidArgumentError      INVALID_ARGUMENT, OUT_OF_RANGE: see ``field_violations``
    ├── NotFoundError             NOT_FOUND: no such model, skill or image
    ├── FailedPreconditionError   FAILED_PRECONDITION: the model lacks the skill
    ├── UnauthenticatedError      UNAUTHENTICATED: the token is missing or invalid
    ├── PermissionDeniedError     PERMISSION_DENIED: the token does not allow this
    ├── OverloadedError           RESOURCE_EXHAUSTED: queue full, or message too large for the server
    ├── UnavailableError          UNAVAILABLE: the server is not reachable, starting or stopping
    │   └── ConnectionLostError   the connection ended before the call
    ├── DeadlineExceededError     DEADLINE_EXCEEDED (also a TimeoutError)
    ├── RequestCancelledError     CANCELLED
    ├── UnimplementedError        UNIMPLEMENTED: an older server, or another kind of server
    └── ServerError               INTERNAL, UNKNOWN, DATA_LOSS and all other codes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"


class KestrelError(Exception):
    """Base of all errors of the client."""


class InvalidRequestError(KestrelError, ValueError):
    """An argument is invalid; nothing was sent."""


class InvalidImageError(InvalidRequestError):
    """The image can't be read, or has an unsupported form."""


class RequestTooLargeError(InvalidRequestError):
    """The message would exceed the client's limit; nothing was sent.

    Attributes: ``size`` and ``limit`` in bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the request has {size} bytes, the limit is max_message_bytes={limit}; "
            "send a smaller or compressed image, or raise the limit here and on the server"
        )
        self.size, self.limit = size, limit


class MissingDependencyError(KestrelError, ImportError):
    """An optional package that this needs is not installed."""


class IncompleteStreamError(KestrelError):
    """The stream ended without an error and without its result."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of the request. ``field``: its path, like ``sampling.top_p``."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A limit that refused the call. ``subject``: its owner: a principal, "anonymous" for callers without a name, or
    "server" for a limit of the whole server."""

    subject: str
    description: str


STATUS_DROPPED = "Internal error from Core"
"""The message of gRPC itself, on an asyncio channel, if it could not send a message of a stream because the server had
just ended the call. It drops the server's status, so only another attempt shows it."""


class RpcError(KestrelError):
    """A call ended with a status other than OK.

    Attributes: ``code`` (grpc.StatusCode), ``message`` (the server's text), ``field_violations``, ``reason`` (a
    machine-readable word like QUEUE_FULL, empty if the server sent none), ``retry_after_s`` (seconds to wait before a
    retry, None if the server sent no hint) and ``quota_violations`` (limits that refused the call).
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field_violations: Sequence[FieldViolation] = (),
        reason: str = "",
        retry_after_s: float | None = None,
        quota_violations: Sequence[QuotaViolation] = (),
    ) -> None:
        fields = "".join(
            f"\n  {v.field}: {v.description}"
            for v in field_violations
            if v.description not in message or v.field not in message
        )
        super().__init__(f"{code.name}: {message}{fields}")
        self.code, self.message = code, message
        self.field_violations = tuple(field_violations)
        self.reason, self.retry_after_s = reason, retry_after_s
        self.quota_violations = tuple(quota_violations)


class InvalidArgumentError(RpcError):
    """The server found a field missing, malformed or out of range."""


class NotFoundError(RpcError):
    """The server has no such model, skill or image; ``reason`` says which is missing."""


class FailedPreconditionError(RpcError):
    """The server or the model does not support this call, or not in its present state."""


class UnauthenticatedError(RpcError):
    """The server requires a valid token or certificate."""


class PermissionDeniedError(RpcError):
    """The caller has no permission for this call."""


class OverloadedError(RpcError):
    """A limit of the server refused the call, or the message is too large for the server."""


class UnavailableError(RpcError):
    """The server can't be reached, or is starting or stopping."""


class ConnectionLostError(UnavailableError):
    """The server, or its connection, ended while it answered. The client repeats unary calls before it raises this.

    ``reason`` is CONNECTION_LOST and ``retry_after_s`` is set, by the client.
    """


class DeadlineExceededError(RpcError, TimeoutError):
    """The timeout passed before the call ended."""


class RequestCancelledError(RpcError):
    """The call was cancelled."""


class UnimplementedError(RpcError):
    """The server doesn't know this method."""


class ServerError(RpcError):
    """The server failed while it processed the call."""


_BY_CODE: dict[grpc.StatusCode, type[RpcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_status(
    code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]]
) -> RpcError:
    """Returns the error of a status. ``trailers`` may contain google.rpc details."""
    return _from_details(code, message, _details(trailers))


def from_rpc_status(status: status_pb2.Status) -> RpcError:
    """Returns the error of a part of a call, such as a task of ``analyze``: the error that a separate call would have
    raised."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _from_details(code, status.message, status.details)


def _from_details(code: grpc.StatusCode, message: str, details: Iterable[any_pb2.Any]) -> RpcError:
    """Unreadable details are ignored."""
    violations: list[FieldViolation] = []
    quotas: list[QuotaViolation] = []
    reason, retry_after_s = "", None
    for detail in details:
        kind = detail.type_url.rpartition("/")[2]
        try:
            if kind == "google.rpc.BadRequest":
                bad_request = error_details_pb2.BadRequest.FromString(detail.value)
                violations += [
                    FieldViolation(v.field, v.description) for v in bad_request.field_violations
                ]
            elif kind == "google.rpc.ErrorInfo":
                reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
            elif kind == "google.rpc.RetryInfo":
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
            elif kind == "google.rpc.QuotaFailure":
                failure = error_details_pb2.QuotaFailure.FromString(detail.value)
                quotas += [QuotaViolation(v.subject, v.description) for v in failure.violations]
        except DecodeError:
            continue
    return _BY_CODE.get(code, ServerError)(
        code,
        message,
        field_violations=violations,
        reason=reason,
        retry_after_s=retry_after_s,
        quota_violations=quotas,
    )


CONNECTION_LOST = "CONNECTION_LOST"
"""The reason of a ConnectionLostError, which no server can send."""
_LOST_RETRY_S = 0.1
"""Another server, or another worker of the same one, answers at once."""
_STREAM_REMOVED = "Stream removed"
"""gRPC's message if the connection ends before the call does. A balancer ends the call in place of the connection."""
_CUT_OFF = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
)


def from_rpc_error(error: grpc.RpcError) -> RpcError:
    """Returns the error of a failed call, synchronous or asynchronous."""
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError)), type(error)
    trailers: Any = error.trailing_metadata() or ()  # These are pairs; the type stubs don't say so.
    code, message = error.code(), error.details() or ""
    if code in _CUT_OFF and message.startswith(_STREAM_REMOVED):
        return ConnectionLostError(
            grpc.StatusCode.UNAVAILABLE,
            "the connection ended before the answer did; the call may be sent again",
            reason=CONNECTION_LOST,
            retry_after_s=_LOST_RETRY_S,
        )
    return from_status(code, message, trailers)


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> Iterable[any_pb2.Any]:
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                details: Iterable[any_pb2.Any] = status_pb2.Status.FromString(value).details
                return details
            except DecodeError:
                return ()
    return ()
