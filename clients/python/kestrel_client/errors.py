"""Every error that the client raises on purpose.

KestrelError
├── InvalidRequestError       refused before sending: an argument is malformed (also a ValueError)
│   ├── InvalidImageError     the picture can't be read or has a form that can't be sent
│   └── RequestTooLargeError  the message exceeds the client's limit
├── MissingDependencyError    Pillow is needed and absent (also an ImportError)
├── IncompleteStreamError     a stream ended well but without its result
└── RpcError                  the server, or the way to it, answered with a status
    ├── InvalidArgumentError      INVALID_ARGUMENT, OUT_OF_RANGE: see ``field_violations``
    ├── NotFoundError             NOT_FOUND: no such model, skill or picture
    ├── FailedPreconditionError   FAILED_PRECONDITION: the model lacks the skill
    ├── UnauthenticatedError      UNAUTHENTICATED: no token, or a wrong one
    ├── PermissionDeniedError     PERMISSION_DENIED: the token does not allow this
    ├── OverloadedError           RESOURCE_EXHAUSTED: queue full, or message too large for the server
    ├── UnavailableError          UNAVAILABLE: not reachable, starting or stopping
    ├── DeadlineExceededError     DEADLINE_EXCEEDED (also a TimeoutError)
    ├── RequestCancelledError     CANCELLED
    ├── UnimplementedError        UNIMPLEMENTED: an older server, or not a Kestrel server
    └── ServerError               INTERNAL, UNKNOWN, DATA_LOSS and what else there is
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ._pb.kestrel.client.internal import wire_pb2
from ._pb.kestrel.v1 import vision_service_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"


class KestrelError(Exception):
    """Base of all errors of the client."""


class InvalidRequestError(KestrelError, ValueError):
    """An argument is malformed; nothing was sent."""


class InvalidImageError(InvalidRequestError):
    """The picture can't be read, or has a form that can't be sent."""


class RequestTooLargeError(InvalidRequestError):
    """The message would exceed the client's limit; nothing was sent.

    Attributes: ``size`` and ``limit`` in bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the request has {size} bytes, the limit is max_message_bytes={limit}; "
            "send a smaller or compressed picture, or raise the limit here and on the server"
        )
        self.size, self.limit = size, limit


class MissingDependencyError(KestrelError, ImportError):
    """An optional package is needed for this and not installed."""


class IncompleteStreamError(KestrelError):
    """The stream ended without an error, but its result never came."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of the request. ``field``: its path, like ``sampling.top_p``."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A limit that refused the call. ``subject``: whose it is: a principal, "anonymous" for callers without a name, or
    "server" for a limit of the whole server."""

    subject: str
    description: str


class RpcError(KestrelError):
    """A call ended with a status other than OK.

    Attributes: ``code`` (grpc.StatusCode), ``message`` (the server's words), ``field_violations``, ``reason`` (a
    machine-readable word like QUEUE_FULL, empty if the server named none), ``retry_after_s`` (seconds to wait before
    another try, None if the server gave no hint) and ``quota_violations`` (limits that refused the call).
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
        told = "".join(
            f"\n  {v.field}: {v.description}"
            for v in field_violations
            if v.description not in message or v.field not in message
        )
        super().__init__(f"{code.name}: {message}{told}")
        self.code, self.message = code, message
        self.field_violations = tuple(field_violations)
        self.reason, self.retry_after_s = reason, retry_after_s
        self.quota_violations = tuple(quota_violations)


class InvalidArgumentError(RpcError):
    """The server found a field missing, malformed or out of range."""


class NotFoundError(RpcError):
    """The server has no such model, skill or picture; ``reason`` tells which."""


class FailedPreconditionError(RpcError):
    """The model can't do this."""


class UnauthenticatedError(RpcError):
    """The server wants a valid token or certificate."""


class PermissionDeniedError(RpcError):
    """The caller may not do this."""


class OverloadedError(RpcError):
    """The server takes no more at the moment, or the message is too large for it."""


class UnavailableError(RpcError):
    """The server can't be reached, or is starting or stopping."""


class DeadlineExceededError(RpcError, TimeoutError):
    """The timeout passed before the result was there."""


class RequestCancelledError(RpcError):
    """The call was cancelled."""


class UnimplementedError(RpcError):
    """The server doesn't know this method."""


class ServerError(RpcError):
    """The server failed."""


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
    """The error of a status; ``trailers`` may hold google.rpc details, of which unreadable ones are passed over."""
    violations: list[FieldViolation] = []
    quotas: list[QuotaViolation] = []
    reason, retry_after_s = "", None
    for detail in _details(trailers):
        kind = detail.type_url.rpartition("/")[2]
        try:
            if kind == "google.rpc.BadRequest":
                bad_request = wire_pb2.BadRequest.FromString(detail.value)
                violations += [
                    FieldViolation(v.field, v.description) for v in bad_request.field_violations
                ]
            elif kind == "google.rpc.ErrorInfo":
                reason = wire_pb2.ErrorInfo.FromString(detail.value).reason
            elif kind == "google.rpc.RetryInfo":
                delay = wire_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
            elif kind == "google.rpc.QuotaFailure":
                failure = wire_pb2.QuotaFailure.FromString(detail.value)
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


def from_rpc_error(error: grpc.RpcError) -> RpcError:
    """The error of a failed call, synchronous or asynchronous."""
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError)), type(error)
    trailers: Any = error.trailing_metadata() or ()  # pairs, though the type stubs don't say so
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNKNOWN and message == "Stream removed":
        # gRPC's words for a call whose connection ended before it could be sent.
        code, message = grpc.StatusCode.UNAVAILABLE, "the connection ended before an answer came"
    return from_status(code, message, trailers)


def from_task_error(error: vision_service_pb2.TaskError) -> RpcError:
    """The error of one task of ``analyze``: what a call of its own would have raised."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    violations = [FieldViolation(v.field, v.description) for v in error.field_violations]
    return _BY_CODE.get(code, ServerError)(
        code, error.message, field_violations=violations, reason=error.reason
    )


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> Sequence[wire_pb2.Detail]:
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return wire_pb2.Status.FromString(value).details
            except DecodeError:
                return ()
    return ()
