"""HttpEdge: the HTTP requests that the model answers, each of them a call (edge/call_life.py).

A request becomes a message of kestrel.v1, and the same services answer it. A client that disconnects cancels its
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kestrel_engine import DeadlineExceeded

from ..edge.call_life import CallLife
from ..edge.calls.call import Call, Context
from ..edge.failures.errors import SlowReader
from ..security.admission.message_limits import COPIES
from ..security.admission.message_room import Hold
from .body import BODY_COPIES, Bodies, content_length
from .context import HttpContext, Receive, Scope, Send
from .fetching import Addresses, ImageFetcher
from .fields import Fields, json_fields
from .forms import JSON, SSE, Form
from .refusals import Rename
from .response import ResponseWriter

_INLINE_BYTES = 256 * 1024
"""A thread parses a larger body, because parsing would occupy the event loop for milliseconds."""
_Parsed = TypeVar("_Parsed")


@dataclass(slots=True)
class ServiceCall:
    """A request in the form that a service accepts."""

    message: Any
    """The request of kestrel.v1, or a list of them."""
    behaviour: Callable[[Any, Context], Awaitable[Any]]
    """The service's method."""
    answer: Callable[[Any], Any]
    """Converts the service's answer to values for JSON, or to a Whole. Not called if ``events`` is given."""
    events: Callable[[Any], Iterable[bytes]] | None = None
    """For a stream: converts each message that ``behaviour`` writes to server-sent events."""
    rename: Rename = lambda path: path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path that the model answers."""

    method: str
    """The corresponding method of kestrel.v1, for logs, metrics and scopes."""
    read: Callable[[Fields], ServiceCall]
    takes_body: bool = True
    types: Collection[bytes] = (JSON,)
    """Content types of the body. b"": the type may be missing, except in requests of web pages."""
    form: Form = SSE
    copies: int = COPIES
    """Number of copies of the message in memory during the request."""
    parse: Callable[[Scope, bytes | bytearray], Fields] | None = None
    """Makes the fields from the request's scope and body, if the body is not a JSON object alone."""
    caps_max_tokens: bool = False
    """Whether the imitated service lowers a limit on the tokens that exceeds the room."""
    timeout_s: Callable[[Scope], float | None] = lambda scope: None
    """Returns the seconds that the client waits for the response; None if it does not say."""


class HttpEdge:
    """``fetcher``: None if the server fetches no images."""

    def __init__(self, life: CallLife, fetcher: ImageFetcher | None = None) -> None:
        self.life, self.fetcher, self.bodies = life, fetcher, Bodies(life.guard)

    async def handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        writer = ResponseWriter(send, self.life.guard.limits.write_s, endpoint.form)
        context = HttpContext(scope, writer.write, endpoint.timeout_s(scope))
        call = self.life.begin(
            endpoint.method, cast(Context, context), caps_max_tokens=endpoint.caps_max_tokens
        )
        exchange = _Exchange(self, endpoint, scope, receive, writer)
        # The client has disconnected or does not read, or the server stops. uvicorn would log an exception.
        with contextlib.suppress(SlowReader, asyncio.CancelledError):
            await self.life.run(call, exchange, self.life.enter)


class _Exchange:
    """One request and its response: the transport of its call."""

    def __init__(
        self,
        edge: HttpEdge,
        endpoint: Endpoint,
        scope: Scope,
        receive: Receive,
        writer: ResponseWriter,
    ) -> None:
        self._edge, self._endpoint, self._scope = edge, endpoint, scope
        self._receive, self._writer = receive, writer
        self._service_call: ServiceCall | None = None

    async def read(self, call: Call, hold: Hold) -> Any:
        endpoint, scope, writer = self._endpoint, self._scope, self._writer
        body = bytearray()
        if endpoint.takes_body:
            body = await self._edge.bodies.read(endpoint.types, scope, self._receive, hold)
        writer.has_read_all = endpoint.takes_body or not content_length(scope["headers"])
        self._service_call = service_call = await self._parse(body, hold)
        del body
        if endpoint.takes_body:
            hold.settle(min(hold.num_bytes, endpoint.copies * _bytes_of(service_call.message)))
        call.streams = service_call.events is not None
        writer.events, writer.rename = service_call.events, service_call.rename
        return service_call.message

    async def _parse(self, body: bytearray, hold: Hold) -> ServiceCall:
        """Converts a request, after the images that it names by address are fetched. Raises InvalidRequest,
        UnsupportedImageError, MessagesFull."""
        endpoint, fetcher = self._endpoint, self._edge.fetcher
        if endpoint.parse is not None:
            parse = endpoint.parse
            return await _parsed(body, lambda: endpoint.read(parse(self._scope, body)))
        if not endpoint.takes_body:
            return endpoint.read(Fields({}))
        addresses = None if fetcher is None else Addresses()
        service_call = await _parsed(body, lambda: endpoint.read(json_fields(body, addresses)))
        if fetcher is None or addresses is None or not addresses.wanted:
            return service_call
        del service_call
        await hold.reserve(BODY_COPIES * (len(body) + self._edge.life.guard.messages.largest))
        hold.arrived(len(body) + await fetcher.fetch(addresses))
        return await _parsed(body, lambda: endpoint.read(json_fields(body, addresses)))

    async def answer(self, call: Call, request: Any) -> None:
        service_call, context = self._service_call, call.context
        assert service_call is not None, "read() comes first"
        async with _cancelled_with(self._receive), _deadline(context.time_remaining()):
            response = await service_call.behaviour(request, context)
            if service_call.events is None:
                await self._writer.answer(service_call.answer(response))
            else:
                await self._writer.end()

    async def refuse(self, call: Call, error: Exception) -> None:
        await self._writer.refuse(self._endpoint.form.told(error, call, self._writer.rename))


async def _parsed(body: bytearray, parse: Callable[[], _Parsed]) -> _Parsed:
    """The result of ``parse``, which a thread computes if the body is large."""
    return parse() if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse)


def _bytes_of(message: Any) -> int:
    messages = message if isinstance(message, list) else [message]
    return sum(each.ByteSize() for each in messages)


@contextlib.asynccontextmanager
async def _cancelled_with(receive: Receive) -> AsyncIterator[None]:
    """Cancels the current task if the client disconnects."""
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()


@contextlib.asynccontextmanager
async def _deadline(left_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded after ``left_s`` seconds; None for no deadline."""
    ends = asyncio.timeout(left_s)
    try:
        async with ends:
            yield
    except TimeoutError:
        if not ends.expired():
            raise
        raise DeadlineExceeded("the deadline of the call passed") from None
