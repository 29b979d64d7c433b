"""HttpEdge: the HTTP requests that the model answers, each of them a call (edge/call_life.py).

A request becomes a message of kestrel.v1, and the same services answer it. A client that disconnects cancels its
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from kestrel_engine import DeadlineExceeded

from ..edge.call_life import CallLife
from ..edge.calls.call import Call, Context
from ..edge.calls.current import current
from ..edge.failures.errors import SlowReader
from ..security.admission.message_room import COPIES, Hold
from .body import BODY_COPIES, Arriving, Bodies, check_head, content_length
from .context import HttpContext, Receive, Scope, Send
from .fetching import Addresses, ImageFetcher
from .fields import Fields, json_fields
from .forms import JSON, SSE, ByteResponse, Form
from .known_fields import KnownFields
from .refusals import Rename

INLINE_BYTES = 256 * 1024
"""A thread parses a larger body, because parsing would occupy the event loop for milliseconds."""


@dataclass(slots=True)
class ServiceCall:
    """A request in the form that a service accepts."""

    message: Any
    """The request of kestrel.v1, or a list of them."""
    behaviour: Callable[[Any, Context], Awaitable[Any]]
    """The service's method."""
    answer: Callable[[Any], Any]
    """Converts the service's answer to values for JSON, or to a ByteResponse. Not called if ``events`` is given."""
    events: Callable[[Any], Iterable[bytes]] | None = None
    """For a stream: converts each message that ``behaviour`` writes to server-sent events."""
    rename: Rename = lambda path: path
    failed: Callable[[bytes], bytes] | None = None
    """Converts the body of an error's response to the last part of a stream that has begun. None: its form does."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path that the model answers."""

    method: str
    """The corresponding method of kestrel.v1, for logs, metrics and scopes."""
    read: Callable[..., ServiceCall]
    """Reads the fields of a JSON object; with ``is_raw``, the request's scope and body."""
    is_raw: bool = False
    fields: KnownFields | None = None
    """The fields that ``read`` knows, for the description of the port."""
    is_served: bool = True
    """False if the server always refuses it, so that the description of the port lacks it."""
    takes_body: bool = True
    pulls: bool = False
    """Whether ``read`` gets an Arriving in place of the body, and returns an iterator over its messages."""
    types: Collection[bytes] = (JSON,)
    """Content types of the body. b"": the type may be missing, except in requests of web pages."""
    encoding: bytes = b""
    """The header that may say that the message is compressed with gzip, which ``read`` then decompresses."""
    inline_bytes: int = INLINE_BYTES
    form: Form = SSE
    copies: int = COPIES
    """Number of copies of the message in memory during the request."""
    caps_max_tokens: bool = False
    """Whether the imitated service lowers a limit on the tokens that exceeds the room."""
    timeout_s: Callable[[Scope], float | None] = lambda scope: None
    """Returns the seconds that the client waits for the response; None if it does not say."""


Endpoints = dict[tuple[str, str], Endpoint]
"""By verb and path."""


class HttpEdge:
    """``fetcher``: None if the server fetches no images."""

    def __init__(self, life: CallLife, fetcher: ImageFetcher | None = None) -> None:
        self.life, self.fetcher, self.bodies = life, fetcher, Bodies(life.guard)

    async def handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self, endpoint, scope, receive, send)
        context: Any = HttpContext(scope, exchange.write, endpoint.timeout_s(scope))
        call = self.life.begin(endpoint.method, context, caps_max_tokens=endpoint.caps_max_tokens)
        # The client has disconnected or does not read, or the server stops. uvicorn would log an exception.
        with contextlib.suppress(SlowReader, asyncio.CancelledError):
            await self.life.run(call, exchange, self.life.enter)


class _Exchange:
    """One request and its response: the transport of its call. A write that the client does not read within the limit
    raises SlowReader."""

    def __init__(
        self, edge: HttpEdge, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._edge, self._endpoint, self._scope = edge, endpoint, scope
        self._receive, self._send = receive, send
        self._service_call: ServiceCall | None = None
        """Between ``read`` and ``answer``, because a refused call holds no request."""
        self._events: Callable[[Any], Iterable[bytes]] | None = None
        self._rename: Rename = lambda path: path
        """Until the request is read, errors have the client's names of fields."""
        self._failed: Callable[[bytes], bytes] | None = None
        self._has_read_all = False
        """Whether the request's body was read to its end. Otherwise the connection can't be used again."""
        self._has_begun = False

    async def read(self, call: Call, hold: Hold) -> Any:
        endpoint, scope = self._endpoint, self._scope
        if endpoint.pulls:
            check_head(endpoint.types, scope, endpoint.encoding)
            life = self._edge.life
            arriving = Arriving(
                self._receive, hold, life.guard.messages, self._edge.bodies.reads, call.use
            )
            self._service_call = endpoint.read(scope, arriving)
            return self._service_call.message
        body = bytearray()
        if endpoint.takes_body:
            body = await self._edge.bodies.read(
                endpoint.types, scope, self._receive, hold, endpoint.encoding
            )
        self._has_read_all = endpoint.takes_body or not content_length(scope["headers"])
        self._service_call = service_call = await self._parse(body, hold)
        del body
        if endpoint.takes_body:
            hold.settle(min(hold.num_bytes, endpoint.copies * _bytes_of(service_call.message)))
        call.streams = service_call.events is not None
        self._events, self._rename = service_call.events, service_call.rename
        self._failed = service_call.failed
        return service_call.message

    async def _parse(self, body: bytearray, hold: Hold) -> ServiceCall:
        """Converts a request, after the images that it names by address are fetched. Raises InvalidRequest,
        UnsupportedImageError, MessagesFull."""
        endpoint, fetcher = self._endpoint, self._edge.fetcher
        if endpoint.is_raw:
            return await self._parsed(body, lambda: endpoint.read(self._scope, body))
        if not endpoint.takes_body:
            return endpoint.read(Fields({}))
        addresses = None if fetcher is None else Addresses()
        service_call = await self._parsed(body, lambda: endpoint.read(json_fields(body, addresses)))
        if fetcher is None or addresses is None or not addresses.wanted:
            return service_call
        del service_call
        await hold.reserve(BODY_COPIES * (len(body) + self._edge.life.guard.messages.largest))
        hold.arrived(len(body) + await fetcher.fetch(addresses))
        return await self._parsed(body, lambda: endpoint.read(json_fields(body, addresses)))

    async def _parsed(self, body: bytearray, parse: Callable[[], ServiceCall]) -> ServiceCall:
        """The result of ``parse``, which a thread computes if the body is large."""
        is_small = len(body) <= self._endpoint.inline_bytes
        return parse() if is_small else await asyncio.to_thread(parse)

    async def answer(self, call: Call, request: Any) -> None:
        (service_call, self._service_call), context = (self._service_call, None), call.context
        assert service_call is not None, "read() comes first"
        # What pulls the body notices by itself that the client disconnects.
        leaves = (
            contextlib.nullcontext() if self._endpoint.pulls else _cancelled_with(self._receive)
        )
        async with leaves, _deadline(context.time_remaining()):
            response = await service_call.behaviour(request, context)
            if service_call.events is None:
                body = service_call.answer(response)
                is_whole = isinstance(body, ByteResponse)
                await self._whole(200, body if is_whole else ByteResponse(orjson.dumps(body), JSON))
            else:
                await self._stream(self._endpoint.form.ending)
                await self._body(b"", has_more=False)

    async def write(self, message: Any) -> None:
        """Sends the events of one message of a stream."""
        assert self._events is not None, "only streams write"
        await self._stream(b"".join(self._events(message)))

    async def refuse(self, call: Call, error: Exception) -> None:
        """Sends an error: as a response, or as the last part of a stream that has begun."""
        response = self._endpoint.form.error_response(error, call, self._rename)
        if not self._has_begun:
            await self._whole(response.status, response.whole)
            return
        failed = self._failed
        last = response.event if failed is None else failed(response.whole.data)
        if not last:
            # A part of a file must not look whole: the connection ends without the body's end.
            raise SlowReader("the form of the response has no word for an error")
        await self._stream(last)
        await self._body(b"", has_more=False)

    async def _whole(self, status: int, body: ByteResponse) -> None:
        kind = (b"content-type", body.content_type)
        length = (b"content-length", str(len(body.data)).encode())
        await self._begin(status, (kind, length, *body.headers))
        await self._body(body.data, has_more=False)

    async def _stream(self, data: bytes) -> None:
        if not data:
            return
        if not self._has_begun:
            kind = (b"content-type", self._endpoint.form.stream_type)
            await self._begin(200, (kind, (b"cache-control", b"no-cache")))
        await self._body(data, has_more=True)

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        ids = [(key.encode(), value.encode()) for key, value in current.get().ids]
        close = () if self._has_read_all else ((b"connection", b"close"),)
        head = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *ids, *close],
        }
        await self._put(head)

    async def _body(self, data: bytes, *, has_more: bool) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": has_more})

    async def _put(self, message: dict[str, Any]) -> None:
        limit_s = self._edge.life.guard.limits.write_s
        try:
            async with asyncio.timeout(limit_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReader(f"the client read nothing of its response for {limit_s:g} s") from None


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
