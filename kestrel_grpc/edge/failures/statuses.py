"""Converts exceptions to gRPC statuses, with the one table of codes and reasons, and adds error details.

A status carries google.rpc details. BadRequest names the invalid field by its path in the request. ErrorInfo holds a
machine-readable reason. RetryInfo holds the time to wait before a retry. QuotaFailure names the principal whose limit
was reached. RequestInfo repeats the request's id. The caller sees the message of an error that is raised on purpose.
For any other error it sees only the request's id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import kestrel_engine as engine
from kestrel_engine import FieldPath, path_text

from ...security.admission.admission import MessageTooLarge, RateExceeded, TooManyCalls
from ...security.admission.budgets import BudgetExceeded
from ...security.admission.message_room import MessagesFull
from ...security.identity.principal import (
    CredentialsInvalid,
    CredentialsMissing,
    NotAuthenticated,
    ScopeMissing,
)
from . import errors
from .status_message import DOMAIN, status_message

PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""The trailer that tells gRPC clients with a retry policy when to retry (gRFC A6)."""

Metadata = tuple[tuple[str, str | bytes], ...]


SERVER, ANONYMOUS = "server", "anonymous"
"""Subjects of a QuotaFailure other than principals: the whole server, and callers without a name."""

DONT_RETRY = "-1"
"""The pushback that forbids a retry, because the same call would fail again, or must wait for long."""


@dataclass(frozen=True, slots=True)
class _Row:
    code: grpc.StatusCode
    reason: str
    """The stable reason in UPPER_SNAKE_CASE, on which clients may depend."""
    public: bool = True
    """Whether the caller sees the exception's message."""


_Code = grpc.StatusCode
TABLE: dict[type[Exception], _Row] = {
    engine.InvalidRequest: _Row(_Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    engine.AdapterUnfit: _Row(_Code.INVALID_ARGUMENT, "ADAPTER_UNFIT"),
    engine.AdapterNotFound: _Row(_Code.NOT_FOUND, "ADAPTER_NOT_FOUND"),
    engine.AdapterRefused: _Row(_Code.FAILED_PRECONDITION, "ADAPTER_REFUSED"),
    engine.AdapterUnavailable: _Row(_Code.UNAVAILABLE, "ADAPTER_UNAVAILABLE"),
    engine.ContextLengthError: _Row(_Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
    engine.ImageDecodeError: _Row(_Code.INVALID_ARGUMENT, "IMAGE_BROKEN"),
    engine.UnsupportedImageError: _Row(_Code.INVALID_ARGUMENT, "IMAGE_FORMAT_UNSUPPORTED"),
    engine.ImageTooLargeError: _Row(_Code.INVALID_ARGUMENT, "IMAGE_TOO_LARGE"),
    engine.ImageTooSlowError: _Row(_Code.INVALID_ARGUMENT, "IMAGE_TOO_SLOW"),
    engine.ImageError: _Row(_Code.INVALID_ARGUMENT, "IMAGE_INVALID"),
    engine.ModelNotFoundError: _Row(_Code.NOT_FOUND, "MODEL_NOT_FOUND"),
    engine.SkillUnavailable: _Row(_Code.FAILED_PRECONDITION, "SKILL_UNAVAILABLE"),
    errors.SkillNotFound: _Row(_Code.NOT_FOUND, "SKILL_NOT_FOUND"),
    errors.ImageNotFound: _Row(_Code.NOT_FOUND, "IMAGE_NOT_FOUND"),
    errors.StoredNotFound: _Row(_Code.NOT_FOUND, "STORED_NOT_FOUND"),
    errors.BatchesNotTaken: _Row(_Code.FAILED_PRECONDITION, "BATCHES_NOT_TAKEN"),
    errors.ImagesNotKept: _Row(_Code.FAILED_PRECONDITION, "IMAGES_NOT_KEPT"),
    engine.RequestError: _Row(_Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    engine.EngineOverloaded: _Row(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    engine.AdaptersFull: _Row(_Code.RESOURCE_EXHAUSTED, "ADAPTERS_FULL"),
    engine.ConstraintsCostly: _Row(_Code.RESOURCE_EXHAUSTED, "CONSTRAINTS_COSTLY"),
    engine.Displaced: _Row(_Code.RESOURCE_EXHAUSTED, "DISPLACED"),
    engine.PixelsWaiting: _Row(_Code.RESOURCE_EXHAUSTED, "PIXELS_WAITING"),
    engine.QueueTimeout: _Row(_Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    errors.ImagesFull: _Row(_Code.RESOURCE_EXHAUSTED, "IMAGES_FULL"),
    errors.UploadsFull: _Row(_Code.RESOURCE_EXHAUSTED, "UPLOADS_FULL"),
    BudgetExceeded: _Row(_Code.RESOURCE_EXHAUSTED, "BUDGET_EXCEEDED"),
    RateExceeded: _Row(_Code.RESOURCE_EXHAUSTED, "RATE_EXCEEDED"),
    TooManyCalls: _Row(_Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"),
    MessagesFull: _Row(_Code.RESOURCE_EXHAUSTED, "MESSAGES_FULL"),
    MessageTooLarge: _Row(_Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    errors.SlowReader: _Row(_Code.RESOURCE_EXHAUSTED, "SLOW_READER"),
    errors.SlowSender: _Row(_Code.RESOURCE_EXHAUSTED, "SLOW_SENDER"),
    errors.UnsupportedBody: _Row(_Code.INVALID_ARGUMENT, "CONTENT_TYPE_UNSUPPORTED"),
    errors.NoMessage: _Row(_Code.UNIMPLEMENTED, "NO_MESSAGE"),
    errors.MethodNotFound: _Row(_Code.UNIMPLEMENTED, "METHOD_NOT_FOUND"),
    errors.NotServed: _Row(_Code.UNIMPLEMENTED, "NOT_SERVED"),
    CredentialsMissing: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_MISSING"),
    CredentialsInvalid: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_INVALID"),
    NotAuthenticated: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_INVALID"),
    ScopeMissing: _Row(_Code.PERMISSION_DENIED, "SCOPE_MISSING"),
    engine.DeadlineExceeded: _Row(_Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    errors.ModelNotReady: _Row(_Code.UNAVAILABLE, "MODEL_NOT_READY"),
    errors.ShuttingDown: _Row(_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    engine.EngineClosed: _Row(_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    engine.ProfileError: _Row(_Code.FAILED_PRECONDITION, "PROFILE_UNAVAILABLE"),
    errors.CaptureError: _Row(_Code.FAILED_PRECONDITION, "CAPTURE_UNAVAILABLE"),
    errors.AuditUnavailable: _Row(_Code.FAILED_PRECONDITION, "AUDIT_UNAVAILABLE"),
    errors.ModelUnavailable: _Row(_Code.FAILED_PRECONDITION, "MODEL_UNAVAILABLE"),
    engine.RuntimeFailure: _Row(_Code.INTERNAL, "COMPUTATION_FAILED", public=False),
    engine.SkillFault: _Row(_Code.INTERNAL, "SKILL_FAILED"),
    # The following errors occur only while the server starts, never in a call.
    engine.ConfigError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
    engine.CheckpointError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
    engine.DownloadError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
    engine.InsufficientMemoryError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
    engine.ModelLoadError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
    engine.KestrelError: _Row(_Code.INTERNAL, "INTERNAL", public=False),
}
"""A class without a row uses the row of its nearest base class."""

_UNFORESEEN = _Row(_Code.INTERNAL, "INTERNAL", public=False)

_MAX_MESSAGE_BYTES = 500
"""Limit on a message. The trailers hold it three times, escaped, and clients accept 8 KiB of trailers."""

_MAX_PATH_BYTES = 200
"""Limit on the path of a field. Only a name that the caller made up is longer, in the arguments of RunSkill."""


def row_of(error: BaseException) -> _Row:
    """The row of the error's nearest class; INTERNAL if no class has a row."""
    for cls in type(error).__mro__:
        row = TABLE.get(cls)
        if row is not None:
            return row
    return _UNFORESEEN


@dataclass(frozen=True, slots=True)
class Complaint:
    """The description of an error for the caller, for any transport. ``path``: of the invalid field; empty if there is
    none. ``details``: messages of google.rpc."""

    code: grpc.StatusCode
    reason: str
    path: FieldPath
    description: str
    details: tuple[Message, ...] = ()

    @property
    def message(self) -> str:
        """The description, after the path."""
        return f"{shown_path(self.path)}: {self.description}" if self.path else self.description

    @property
    def status(self) -> status_pb2.Status:
        return status_message(self.code.value[0], self.message, self.details)


def shown_path(path: FieldPath) -> str:
    """The text of a path, with a bounded length."""
    return _bounded(path_text(path), _MAX_PATH_BYTES)


def complaint(error: BaseException, request_id: str) -> Complaint:
    row = row_of(error)
    path: FieldPath = ()
    if not row.public:
        what = "the computation failed" if row.reason == "COMPUTATION_FAILED" else "internal error"
        text = f"{what}; the server's log has details under request id {request_id}"
    elif isinstance(error, engine.RequestError):
        path, text = error.path, error.message
    else:
        text = str(error)
    described = Complaint(row.code, row.reason, path, _bounded(text))
    return replace(described, details=tuple(_details(error, described, request_id)))


def _details(error: BaseException, report: Complaint, request_id: str) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(
        reason=report.reason, domain=DOMAIN, metadata=_metadata(error, report.path)
    )
    if report.path:
        yield _bad_request(shown_path(report.path), report.description, report.reason)
    if isinstance(error, engine.EngineOverloaded):
        yield _retry_after(error.retry_after_s)
        yield _quota_failure(error.quota, report.message)
    elif isinstance(error, (errors.ModelNotReady, engine.EngineClosed, engine.AdapterUnavailable)):
        yield _retry_after(1.0)
    yield error_details_pb2.RequestInfo(request_id=request_id)


def _metadata(error: BaseException, path: FieldPath) -> dict[str, str]:
    """What a program needs of an error: the invalid field, its value and the limit, the names that it may have."""
    facts = {"field": shown_path(path)} if path else {}
    if isinstance(error, engine.RequestError):
        values = {"value": error.value, "limit": error.limit, "known": ", ".join(error.known)}
        facts |= {
            name: _bounded(_number(value) if isinstance(value, (int, float)) else value)
            for name, value in values.items()
            if value not in (None, "")
        }
    quota = error.quota if isinstance(error, engine.EngineOverloaded) else None
    if quota is not None:
        facts |= {"limit": str(quota.share), "value": str(quota.held), "unit": quota.what}
    return facts


def _number(value: float) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def status_of(error: BaseException, request_id: str) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailers of the status for ``error``."""
    described = complaint(error, request_id)
    details = tuple(rpc_status.to_status(described.status).trailing_metadata)
    return described.code, described.message, (*details, *pushback(error))


def pushback(error: BaseException) -> tuple[tuple[str, str], ...]:
    """The trailers that say when to retry, if ``error`` says it."""
    if isinstance(error, BudgetExceeded):
        return ((PUSHBACK_KEY, DONT_RETRY),)  # RetryInfo may be hours.
    if isinstance(error, engine.EngineOverloaded):
        return ((PUSHBACK_KEY, str(round(1000 * error.retry_after_s))),)
    if isinstance(error, (MessageTooLarge, errors.SlowReader, errors.SlowSender)):
        return ((PUSHBACK_KEY, DONT_RETRY),)
    return ()


def _bounded(text: str, most: int = _MAX_MESSAGE_BYTES) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= most else f"{data[:most].decode(errors='ignore')}…"


def _bad_request(path: str, description: str, reason: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=path, description=description, reason=reason
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _quota_failure(quota: engine.Quota | None, message: str) -> error_details_pb2.QuotaFailure:
    """Names the principal whose limit was reached, or the server if ``quota`` is None."""
    subject = SERVER if quota is None else quota.principal or ANONYMOUS
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)
    return error_details_pb2.QuotaFailure(violations=[violation])


def _retry_after(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(1e9 * seconds))
    return info
