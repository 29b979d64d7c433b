"""Reads code, message and google.rpc details of a failed call."""

from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class Failure:
    code: grpc.StatusCode
    message: str
    fields: list[str]
    reason: str
    domain: str
    metadata: dict[str, str]
    retry_after_s: float | None
    quota_subject: str | None
    request_id: str
    trailers: dict[str, Any]


async def failure(call) -> Failure:
    """Awaits a unary call, or reads a stream, that must fail."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return read(error)
    raise AssertionError("the call succeeded")


def read(error: Any) -> Failure:
    """What a grpc.RpcError says."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    if status.code:
        assert status.code == error.code().value[0]
        assert status.message == error.details()
    return replace(
        of_message(status), code=error.code(), message=error.details() or "", trailers=trailers
    )


def of_message(status: status_pb2.Status) -> Failure:
    """What a status says that is a message."""
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.RequestInfo()
    retry, subject = None, None
    for detail in status.details:
        violations = error_details_pb2.BadRequest()
        delay = error_details_pb2.RetryInfo()
        quota = error_details_pb2.QuotaFailure()
        if detail.Unpack(violations):
            assert all(violation.description for violation in violations.field_violations)
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(quota):
            [violation] = quota.violations
            assert violation.description == status.message
            subject = violation.subject
        else:
            assert detail.Unpack(info) or detail.Unpack(request)
    return Failure(
        code=_CODES[status.code], message=status.message, fields=fields_of(status),
        metadata=dict(info.metadata), reason=info.reason, domain=info.domain, retry_after_s=retry,
        quota_subject=subject, request_id=request.request_id, trailers={},
    )  # fmt: skip


def fields_of(status: status_pb2.Status) -> list[str]:
    """The paths of the invalid fields that a status names."""
    request = error_details_pb2.BadRequest()
    found = [detail for detail in status.details if detail.Unpack(request)]
    return [violation.field for violation in request.field_violations] if found else []
