"""Form: how streams and errors look to one kind of client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from ..edge.calls.call import Call
from ..edge.failures.statuses import complaint
from .refusals import Rename, refusal

JSON = b"application/json"


@dataclass(frozen=True, slots=True)
class ByteResponse:
    """A response that does not consist of JSON only. ``headers``: additional to length, type and ids."""

    data: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error for the client: ``status`` and ``whole`` if nothing has been sent yet, or else ``event``, the last part
    of the stream."""

    status: int
    whole: ByteResponse
    event: bytes


class Form(Protocol):
    """The form of streams and errors for one kind of client."""

    @property
    def stream_type(self) -> bytes:
        """The content type of streams."""

    @property
    def ending(self) -> bytes:
        """The last part of a stream that succeeds."""

    def error_response(self, error: Exception, call: Call, rename: Rename) -> ErrorResponse:
        """Describes an error. ``rename``: as of refusal."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Errors as JSON, with an HTTP status. The functions get errors in the form of refusals.py."""

    stream_type: bytes
    error: Callable[[dict[str, Any]], dict[str, Any]]
    error_event: Callable[[dict[str, Any]], bytes]
    ending: bytes = b""

    def error_response(self, error: Exception, call: Call, rename: Rename) -> ErrorResponse:
        status, body, headers = refusal(error, complaint(error, call.request_id), rename)
        whole = ByteResponse(orjson.dumps(self.error(body)), JSON, headers)
        return ErrorResponse(status, whole, self.error_event(body))


def sent_event(values: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(values) + b"\n\n"


SSE = JsonForm(
    stream_type=b"text/event-stream",
    error=lambda body: body,
    error_event=lambda body: sent_event({**body, "completed": True}),
)
"""Server-sent events, with errors in the form of OpenAI's and Moondream's clients."""
