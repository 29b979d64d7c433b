"""The errors of the client. All are KestrelErrors; a call that ended with a status other than OK raises an RpcError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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
    """An argument is invalid; nothing was sent. Also a ValueError."""


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
    """An optional package that this needs is not installed. Also an ImportError."""


class IncompleteStreamError(KestrelError):
    """The stream ended with OK, but without its result."""


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
just ended the call, or the connection was lost. It drops the status, so only another attempt shows it. The server has
not seen the end of the stream."""


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
    """INVALID_ARGUMENT, OUT_OF_RANGE: the server found a field missing, malformed or out of range; see
    ``field_violations``."""


class NotFoundError(RpcError):
    """NOT_FOUND: the server has no such model, skill or image; ``reason`` says which is missing."""


class FailedPreconditionError(RpcError):
    """FAILED_PRECONDITION: the server or the model does not support this call, or not in its present state."""


class UnauthenticatedError(RpcError):
    """UNAUTHENTICATED: the server requires a valid token or certificate."""


class PermissionDeniedError(RpcError):
    """PERMISSION_DENIED: the caller has no permission for this call."""


class OverloadedError(RpcError):
    """RESOURCE_EXHAUSTED: a limit of the server refused the call, or the message is too large for the server."""


class UnavailableError(RpcError):
    """UNAVAILABLE: the server can't be reached, or is starting or stopping."""


class ConnectionLostError(UnavailableError):
    """The server, or its connection, ended while it answered. The client repeats unary calls before it raises this.

    ``reason`` is CONNECTION_LOST and ``retry_after_s`` is set, by the client.
    """


class DeadlineExceededError(RpcError, TimeoutError):
    """DEADLINE_EXCEEDED: the timeout passed before the call ended. Also a TimeoutError."""


class RequestCancelledError(RpcError):
    """CANCELLED: the call was cancelled."""


class UnimplementedError(RpcError):
    """UNIMPLEMENTED: the server doesn't know this method, as it is older or another kind of server."""


class ServerError(RpcError):
    """INTERNAL, UNKNOWN, DATA_LOSS and all other codes: the server failed while it processed the call."""


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
    bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    parts: tuple[Any, ...] = (bad_request, info, retry, quota)
    read = {each.DESCRIPTOR.full_name: each for each in parts}
    for detail in details:
        if (known := read.get(detail.type_url.rpartition("/")[2])) is not None:
            with suppress(DecodeError):
                known.MergeFrom(known.FromString(detail.value))
    delay = retry.retry_delay
    return _BY_CODE.get(code, ServerError)(
        code,
        message,
        field_violations=[
            FieldViolation(each.field, each.description) for each in bad_request.field_violations
        ],
        reason=info.reason,
        retry_after_s=delay.seconds + delay.nanos / 1e9 if retry.HasField("retry_delay") else None,
        quota_violations=[
            QuotaViolation(each.subject, each.description) for each in quota.violations
        ],
    )


CONNECTION_LOST = "CONNECTION_LOST"
"""The reason of a ConnectionLostError, which no server can send."""
_LOST_RETRY_S = 0.1
"""Another server, or another worker of the same one, answers at once."""
_STREAM_REMOVED = "Stream removed"
"""gRPC's message if the connection ends before the call does. A balancer ends the call in place of the connection."""
_CUT_OFF = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)


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


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> Iterator[any_pb2.Any]:
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                yield from status_pb2.Status.FromString(value).details
