"""A call that is ready to be sent. The methods of all clients prepare one of these and hand it to their channel."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import Message

from ..connection import Connection, Metadata
from ..errors import RequestTooLargeError
from .streams import Reading

if TYPE_CHECKING:
    from .restoring import Restoring

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Stub: TypeAlias = Callable[[Any], Any]
"""A class of stubs: called with a channel, it gives an object with one callable for each method."""

Sent: TypeAlias = Message | Callable[[], Iterator[Message] | AsyncIterator[Message]]
"""The request of a call. For a stream of requests, a function that gives its messages, for each attempt."""


class Method(NamedTuple):
    """A unary method of a service, and its streaming variant, which takes the same request, if there is one."""

    stub: Stub
    unary: str
    stream: str = ""
    repeatable: bool = False
    """Whether the unary method may be called again if it is not known whether the server has answered it."""


@dataclass(frozen=True, slots=True)
class PreparedCall(Generic[R_co]):
    """A request, the method that takes it, and the function that reads its response."""

    method: Method
    request: Sent
    reading: Reading[R_co]
    handling: dict[str, Any]
    """Keyword arguments for gRPC: ``timeout`` and ``metadata``, and ``wait_for_ready`` where it is wanted."""
    restoring: Restoring | None = None
    """Puts the images of the call again; None for a call without images."""
    started_at: float = field(default_factory=time.monotonic)
    """The timeout begins here, and covers all attempts."""

    @property
    def left(self) -> float | None:
        """Seconds until the end of the timeout; None without one."""
        timeout: float | None = self.handling["timeout"]
        if timeout is None:
            return None
        return max(timeout - (time.monotonic() - self.started_at), 0.001)

    def send(self, stub: Any) -> Any:
        """Calls the unary method. Returns the response, or on an asyncio channel an awaitable of it."""
        return self._sent(getattr(stub, self.method.unary))

    def begin(self, stub: Any) -> Any:
        """Calls the unary method of a synchronous channel without waiting. Returns gRPC's future."""
        return self._sent(getattr(stub, self.method.unary).future)

    def open_stream(self, stub: Any) -> Any:
        """Calls the streaming method. Returns gRPC's call object."""
        return self._sent(getattr(stub, self.method.stream))

    def _sent(self, method: Callable[..., Any]) -> Any:
        request = self.request if isinstance(self.request, Message) else self.request()
        return method(request, **{**self.handling, "timeout": self.left})


def prepare_call(
    connection: Connection,
    method: Method,
    request: Sent,
    read: Reading[R] | Callable[[Any], R] = lambda response: response,
    *,
    timeout: float | None = None,
    metadata: Metadata | None = None,
    about: str = "",
    restoring: Restoring | None = None,
    **handling: Any,
) -> PreparedCall[R]:
    """Completes a call with the timeout and metadata of the connection.

    ``read`` makes the result from the response. ``about``: selects the server of the call, if there are several. Raises
    RequestTooLargeError, or InvalidRequestError for an invalid timeout or invalid metadata.
    """
    limit = connection.max_message_bytes
    if isinstance(request, Message):
        size = request.ByteSize()
        if size > limit:
            raise RequestTooLargeError(size, limit)
    handling["timeout"] = connection.call_timeout(timeout)
    handling["metadata"] = connection.call_metadata(metadata, about)
    reading = read if isinstance(read, Reading) else Reading(read)
    return PreparedCall(method, request, reading, handling, restoring)
