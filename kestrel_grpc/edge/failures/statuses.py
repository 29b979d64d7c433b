"""Converts exceptions to gRPC statuses, with the one table of codes and reasons, and adds error details.

A status carries google.rpc details. BadRequest names the invalid field by its path in the request. ErrorInfo holds a
machine-readable reason. RetryInfo holds the time to wait before a retry. QuotaFailure names the principal whose limit
was reached. RequestInfo repeats the request's id. The caller sees the message of an error that is raised on purpose.
For any other error it sees only the request's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import kestrel_engine as engine

from ...security.admission.admission import MessageTooLarge, RateExceeded, TooManyCalls
from ...security.admission.message_room import MessagesFull
from ...security.identity.principal import (
    CertificateRevoked,
    CredentialsInvalid,
    CredentialsMissing,
    NotAuthenticated,
    ScopeMissing,
)
from .errors import (
    CaptureError,
    ImageNotFound,
    ImagesFull,
    ImagesNotKept,
    LocatedError,
    MethodNotFound,
    ModelNotReady,
    ModelUnavailable,
    NoMessage,
    NotServed,
    ShuttingDown,
    SkillNotFound,
    SlowReader,
    SlowSender,
    UnsupportedBody,
    UploadsFull,
)

DOMAIN = "kestrel.v1"
"""The domain of every ErrorInfo. Reasons are unique within it."""

PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""The trailer that tells gRPC clients with a retry policy when to retry (gRFC A6)."""

Metadata = tuple[tuple[str, str | bytes], ...]


SERVER, ANONYMOUS = "server", "anonymous"
"""Subjects of a QuotaFailure other than principals: the whole server, and callers without a name."""

DONT_RETRY = "-1"
"""The pushback that forbids a retry, because the same call would fail again."""


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
    SkillNotFound: _Row(_Code.NOT_FOUND, "SKILL_NOT_FOUND"),
    ImageNotFound: _Row(_Code.NOT_FOUND, "IMAGE_NOT_FOUND"),
    ImagesNotKept: _Row(_Code.FAILED_PRECONDITION, "IMAGES_NOT_KEPT"),
    engine.RequestError: _Row(_Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    engine.EngineOverloaded: _Row(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    engine.AdaptersFull: _Row(_Code.RESOURCE_EXHAUSTED, "ADAPTERS_FULL"),
    engine.ConstraintsCostly: _Row(_Code.RESOURCE_EXHAUSTED, "CONSTRAINTS_COSTLY"),
    engine.Displaced: _Row(_Code.RESOURCE_EXHAUSTED, "DISPLACED"),
    engine.PixelsWaiting: _Row(_Code.RESOURCE_EXHAUSTED, "PIXELS_WAITING"),
    engine.QueueTimeout: _Row(_Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    ImagesFull: _Row(_Code.RESOURCE_EXHAUSTED, "IMAGES_FULL"),
    UploadsFull: _Row(_Code.RESOURCE_EXHAUSTED, "UPLOADS_FULL"),
    RateExceeded: _Row(_Code.RESOURCE_EXHAUSTED, "RATE_EXCEEDED"),
    TooManyCalls: _Row(_Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"),
    MessagesFull: _Row(_Code.RESOURCE_EXHAUSTED, "MESSAGES_FULL"),
    MessageTooLarge: _Row(_Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    SlowReader: _Row(_Code.RESOURCE_EXHAUSTED, "SLOW_READER"),
    SlowSender: _Row(_Code.RESOURCE_EXHAUSTED, "SLOW_SENDER"),
    UnsupportedBody: _Row(_Code.INVALID_ARGUMENT, "CONTENT_TYPE_UNSUPPORTED"),
    NoMessage: _Row(_Code.UNIMPLEMENTED, "NO_MESSAGE"),
    MethodNotFound: _Row(_Code.UNIMPLEMENTED, "METHOD_NOT_FOUND"),
    NotServed: _Row(_Code.UNIMPLEMENTED, "NOT_SERVED"),
    CredentialsMissing: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_MISSING"),
    CredentialsInvalid: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_INVALID"),
    CertificateRevoked: _Row(_Code.UNAUTHENTICATED, "CERTIFICATE_REVOKED"),
    NotAuthenticated: _Row(_Code.UNAUTHENTICATED, "CREDENTIALS_INVALID"),
    ScopeMissing: _Row(_Code.PERMISSION_DENIED, "SCOPE_MISSING"),
    engine.DeadlineExceeded: _Row(_Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    ModelNotReady: _Row(_Code.UNAVAILABLE, "MODEL_NOT_READY"),
    ShuttingDown: _Row(_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    engine.EngineClosed: _Row(_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    engine.ProfileError: _Row(_Code.FAILED_PRECONDITION, "PROFILE_UNAVAILABLE"),
    CaptureError: _Row(_Code.FAILED_PRECONDITION, "CAPTURE_UNAVAILABLE"),
    ModelUnavailable: _Row(_Code.FAILED_PRECONDITION, "MODEL_UNAVAILABLE"),
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

_SAMPLING_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "max_reasoning_tokens",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "constraint",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    }
)
_OPTION_FIELDS = frozenset({"request_id", "priority", "model", "cache_salt", "adapter"})
_MODEL_FIELDS = frozenset({"skill", "segment"})
"""The engine's field names for a skill that the model does not have. The caller can change only options.model."""


def row_of(error: BaseException) -> _Row:
    """The row of the error's nearest class; INTERNAL if no class has a row."""
    if isinstance(error, LocatedError):
        error = error.error
    for cls in type(error).__mro__:
        row = TABLE.get(cls)
        if row is not None:
            return row
    return _UNFORESEEN


def field_path(name: str, prefix: str = "") -> str:
    """The path of the request field for the engine's name of an argument. "" stands for the whole request, or for the
    message that ``prefix`` names."""
    root = name.partition("[")[0].partition(".")[0]
    if root in _SAMPLING_FIELDS:
        name = f"sampling.{name}"
    elif root in _OPTION_FIELDS:
        name = f"options.{name}"
    elif root in _MODEL_FIELDS:
        name = "options.model"
    elif root == "presupposes":
        name = f"abstention.objects{name.removeprefix(root)}"
    elif root == "max_absence":
        name = "abstention.max_absence"
    return (prefix + name).rstrip(".")


@dataclass(frozen=True, slots=True)
class Complaint:
    """The description of an error for the caller, for any transport. ``violations``: field paths and descriptions."""

    code: grpc.StatusCode
    message: str
    reason: str
    violations: tuple[tuple[str, str], ...] = ()


def complaint(error: BaseException, request_id: str, prefix: str = "") -> Complaint:
    """Describes an error. ``prefix`` precedes every field path, like ``tasks[0].detect.``."""
    row = row_of(error)
    if not row.public:
        what = "the computation failed" if row.reason == "COMPUTATION_FAILED" else "internal error"
        message = f"{what}; the server's log has details under request id {request_id}"
        return Complaint(row.code, message, row.reason)
    if isinstance(error, LocatedError):
        path, text = prefix + error.path, _bounded(error.error.message)
    elif isinstance(error, engine.RequestError):
        path, text = field_path(error.field, prefix), _bounded(error.message)
    else:
        return Complaint(row.code, _bounded(str(error)), row.reason)
    if not path:
        return Complaint(row.code, text, row.reason)
    path = _bounded(path, _MAX_PATH_BYTES)
    return Complaint(row.code, f"{path}: {text}", row.reason, ((path, text),))


def status_of(error: BaseException, request_id: str) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailers of the status for ``error``."""
    described = complaint(error, request_id)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=described.reason, domain=DOMAIN)]
    trailers: Metadata = ()
    for path, description in described.violations:
        details.append(_bad_request(path, description, described.reason))
    if isinstance(error, engine.EngineOverloaded):
        details.append(_retry_after(error.retry_after_s))
        details.append(_quota_failure(error.quota, described.message))
        trailers = ((PUSHBACK_KEY, str(round(1000 * error.retry_after_s))),)
    elif isinstance(error, (MessageTooLarge, SlowReader, SlowSender)):
        trailers = ((PUSHBACK_KEY, DONT_RETRY),)
    elif isinstance(error, (ModelNotReady, engine.EngineClosed, engine.AdapterUnavailable)):
        details.append(_retry_after(1.0))
    details.append(error_details_pb2.RequestInfo(request_id=request_id))
    code, message = described.code, described.message
    return code, message, (*_packed(code, message, details), *trailers)


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


def _packed(code: grpc.StatusCode, message: str, details: Sequence[Message]) -> Metadata:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    return tuple(rpc_status.to_status(status).trailing_metadata)
