"""Converts exceptions to gRPC statuses, with the one table of codes and reasons, and adds error details.

A status carries google.rpc details. BadRequest names the invalid field by its path in the request. ErrorInfo holds a
machine-readable reason. RetryInfo holds the time to wait before a retry. QuotaFailure names the principal whose limit
was reached. RequestInfo repeats the request's id. The caller sees the message of an error that is raised on purpose.
For any other error it sees only the request's id.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
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
from .status_message import DOMAIN, status_message

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

_ENGINE_WORDS = {
    "object": "objects[0]",
    "image": "images[0]",
    "presupposes": "abstention.objects",
    "refine": "refinement",
}
"""The fields whose name in the engine is another one, at least in some requests."""
_MODEL_FIELDS = ("skill", "segment")
"""The engine's fields of a skill that the model does not have."""
_CHOICES = ("constraint.choices[", "constraint.choices.texts[")
"""The engine's path of a choice, and that of the message."""


def row_of(error: BaseException) -> _Row:
    """The row of the error's nearest class; INTERNAL if no class has a row."""
    if isinstance(error, LocatedError):
        error = error.error
    for cls in type(error).__mro__:
        row = TABLE.get(cls)
        if row is not None:
            return row
    return _UNFORESEEN


Place = tuple[str, Any]
"""Where a request may hold a field: the path of a message, which is empty or ends with a dot, and its descriptor."""


def place_of(message: Any) -> tuple[Place, ...]:
    """A whole request as the only place. ``message``: none, if it is no message."""
    return (("", message.DESCRIPTOR),) if isinstance(message, Message) else ()


def field_path(name: str, *places: Place) -> str:
    """The path of the field for the engine's name of an argument, which may be empty: the field of this name that is
    least deep in the first of ``places`` that has one."""
    root = _first(name)
    rest = name.replace(*_CHOICES)[len(root) :]
    for prefix, kind in places:
        if not root:
            return prefix.rstrip(".")
        for word in (root, _ENGINE_WORDS.get(root, root)):
            first = _first(word)
            path = _path_in(kind, first)
            if path is not None:
                return prefix + path + word[len(first) :] + rest
    return name


def _first(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


@functools.cache
def _path_in(kind: Any, name: str) -> str | None:
    level = [("", kind)]
    while level:
        for prefix, each in level:
            if name in each.fields_by_name:
                return f"{prefix}{name}"
        level = [
            (f"{prefix}{field.name}.", field.message_type)
            for prefix, each in level
            for field in each.fields
            if field.message_type is not None
            and not field.is_repeated
            and field.message_type.file.package == kind.file.package
        ]
    return None


@dataclass(frozen=True, slots=True)
class Complaint:
    """The description of an error for the caller, for any transport. ``violations``: field paths and descriptions.
    ``details``: messages of google.rpc."""

    code: grpc.StatusCode
    message: str
    reason: str
    violations: tuple[tuple[str, str], ...] = ()
    details: tuple[Message, ...] = ()

    @property
    def status(self) -> status_pb2.Status:
        """The status as a message, with its details."""
        return status_message(self.code.value[0], self.message, self.details)


def complaint(error: BaseException, request_id: str, *places: Place) -> Complaint:
    """Describes an error. ``places``: the messages in which the invalid field may be, in order; without them, the
    engine's name of the field is its path."""
    row = row_of(error)
    path, text = "", ""
    if not row.public:
        what = "the computation failed" if row.reason == "COMPUTATION_FAILED" else "internal error"
        text = f"{what}; the server's log has details under request id {request_id}"
    elif isinstance(error, LocatedError):
        path, text = error.path, error.error.message
    elif isinstance(error, engine.SkillUnavailable) and error.field in _MODEL_FIELDS:
        # The caller can change only the model.
        path, text = field_path("model", *places), error.message
    elif isinstance(error, engine.RequestError):
        path, text = field_path(error.field, *places), error.message
    else:
        text = str(error)
    text, path = _bounded(text), _bounded(path, _MAX_PATH_BYTES)
    message = f"{path}: {text}" if path else text
    violations = ((path, text),) if path else ()
    return Complaint(
        *(row.code, message, row.reason, violations),
        details=tuple(_details(error, row.reason, message, violations, request_id)),
    )


def _details(
    error: BaseException,
    reason: str,
    message: str,
    violations: tuple[tuple[str, str], ...],
    request_id: str,
) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata=_metadata(error, violations)
    )
    for path, description in violations:
        yield _bad_request(path, description, reason)
    if isinstance(error, engine.EngineOverloaded):
        yield _retry_after(error.retry_after_s)
        yield _quota_failure(error.quota, message)
    elif isinstance(error, (ModelNotReady, engine.EngineClosed, engine.AdapterUnavailable)):
        yield _retry_after(1.0)
    yield error_details_pb2.RequestInfo(request_id=request_id)


def _metadata(error: BaseException, violations: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """What a program needs of an error: the invalid field, its value and the limit, the names that it may have."""
    facts = {"field": violations[0][0]} if violations else {}
    if isinstance(error, LocatedError):
        error = error.error
    if isinstance(error, engine.RequestError):
        told = {"value": error.value, "limit": error.limit, "known": ", ".join(error.known)}
        facts |= {
            name: _bounded(_number(value) if isinstance(value, (int, float)) else value)
            for name, value in told.items()
            if value not in (None, "")
        }
    quota = error.quota if isinstance(error, engine.EngineOverloaded) else None
    if quota is not None:
        facts |= {"limit": str(quota.share), "value": str(quota.held), "unit": quota.what}
    return facts


def _number(value: float) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def status_of(
    error: BaseException, request_id: str, message: Any = None
) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailers of the status for ``error``. ``message``: the request, if it was read."""
    described = complaint(error, request_id, *place_of(message))
    trailers: Metadata = ()
    if isinstance(error, engine.EngineOverloaded):
        trailers = ((PUSHBACK_KEY, str(round(1000 * error.retry_after_s))),)
    elif isinstance(error, (MessageTooLarge, SlowReader, SlowSender)):
        trailers = ((PUSHBACK_KEY, DONT_RETRY),)
    details = tuple(rpc_status.to_status(described.status).trailing_metadata)
    return described.code, described.message, (*details, *trailers)


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
