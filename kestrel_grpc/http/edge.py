"""HttpEdge: handles every HTTP request that the model answers. Owns the order of the steps.

The order is that of edge/interceptors.py: the guard identifies the caller from the headers, admits the request, and
reserves memory, before the body is read. The request then becomes a message of kestrel.v1, and the same services answer
it. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import orjson

from kestrel_engine import DeadlineExceeded, InvalidRequest

from ..edge.calls.call import (
    REQUEST_ID_KEY,
    TRACE_ID_KEY,
    Call,
    Context,
    code_of_cancellation,
    id_from_metadata,
    new_id,
)
from ..edge.calls.call_limit import CallLimit
from ..edge.calls.call_watcher import CallWatcher
from ..edge.calls.current_call import current
from ..edge.calls.in_flight import InFlight
from ..edge.failures.endings import delay_refusal, finish, note
from ..edge.failures.errors import SlowReader, SlowSender, UnsupportedBody
from ..edge.messages.request_options import check_priority, options_of, take_id
from ..security.admission.admission import MessageTooLarge
from ..security.admission.guard import Guard
from ..security.admission.message_limits import COPIES
from ..security.admission.message_room import Hold
from ..security.connections.connection_guard import ConnectionGuard
from .context import HttpContext
from .fetching import ImageFetcher, places
from .fields import Fields, json_fields
from .forms import JSON, SSE, Form, Told, Whole
from .refusals import Rename

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_BODY_COPIES = 4
"""Number of copies of a body in memory while it is read: as received, as text, decoded, and in a message."""
_TEXT_BYTES = 1024 * 1024
"""Bytes of a body in addition to its image."""
_INLINE_BYTES = 256 * 1024
"""A thread parses a larger body, because parsing would occupy the event loop for milliseconds."""
_Parsed = TypeVar("_Parsed")
_KEY_HEADERS = (b"x-moondream-auth", b"x-api-key")
"""Headers in which clients send a key, in addition to ``authorization``."""


@dataclass(slots=True)
class Asked:
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
    read: Callable[[Fields], Asked]
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

    def asked(self, scope: Scope, body: bytes | bytearray) -> Asked:
        """Converts a request to the form that its service accepts. Raises InvalidRequest."""
        if self.parse is not None:
            return self.read(self.parse(scope, body))
        return self.read(json_fields(body) if self.takes_body else Fields({}))


class HttpEdge:
    """``connections``: the guard of the port's connections. ``end_call`` is called once at the end of every request.
    ``fetcher``: None if the server fetches no images."""

    def __init__(
        self,
        in_flight: InFlight,
        guard: Guard,
        connections: ConnectionGuard,
        end_call: Callable[[Call], None],
        watcher: CallWatcher | None = None,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        self._in_flight, self._guard, self._connections = in_flight, guard, connections
        self._fetcher = fetcher
        self._end_call, self._watcher = end_call, watcher
        limits = guard.limits
        self._limit = CallLimit(limits.deadline_s)
        self._reads = CallLimit(
            limits.read_s, lambda s: SlowSender(f"the request's body did not arrive within {s:g} s")
        )
        largest = guard.messages.largest
        self._largest = largest * 4 // 3 + _TEXT_BYTES
        """Limit on the bytes of a body. base64 turns three bytes into four."""

    async def handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        metadata = metadata_of(scope["headers"])
        writer = _Writer(send, self._guard.limits.write_s, endpoint.form)
        context = HttpContext(scope, writer.write, endpoint.timeout_s(scope))
        call = Call(
            method=endpoint.method,
            peer=context.peer(),
            context=cast(Context, context),
            metadata=metadata,
            request_id=id_from_metadata(metadata) or new_id(),
            longest_s=self._guard.limits.deadline_s,
            caps_max_tokens=endpoint.caps_max_tokens,
        )
        writer.call = call
        current.set(call)
        watcher = self._watcher
        if watcher is not None:
            watcher.begin(call)
        failed: Exception | None = None
        use = self._connections.use(call.peer)
        with self._in_flight, use:
            try:
                call.principal = principal = self._guard.principal(metadata, call.context)
                call.owner = principal.name or call.owner
                use.is_known = True
                await self._answer(call, endpoint, scope, receive, writer)
            except asyncio.CancelledError:
                # The client has disconnected, or the server stops. uvicorn would log an exception.
                call.code = code_of_cancellation(call.context)
            except Exception as error:  # The edge: the one place where errors become responses.
                failed = error
                note(call, error)
                told = endpoint.form.told(error, call, writer.rename)
                with contextlib.suppress(SlowReader, asyncio.CancelledError):
                    await delay_refusal(self._guard.refusals, call, error)
                    await writer.refuse(told)
            finally:
                finish(call, self._end_call, watcher, failed)
                failed = None

    async def _answer(
        self, call: Call, endpoint: Endpoint, scope: Scope, receive: Receive, writer: _Writer
    ) -> None:
        guard, watcher, principal = self._guard, self._watcher, call.principal
        with (
            guard.admit(principal, call.method),
            contextlib.closing(guard.hold(principal, call.peer)) as hold,
        ):
            guard.check_room(call.method)
            if endpoint.takes_body:
                _check_type(endpoint.types, scope["headers"])
                _check_encoding(scope["headers"])
                body = await self._body(scope, receive, hold)
                writer.has_read_all = True
                asked = await self._asked(endpoint, scope, body, hold)
                del body
                held = endpoint.copies * _bytes_of(asked.message)
                hold.settle(min(hold.num_bytes, held))
            else:
                writer.has_read_all = not _content_length(scope["headers"])
                asked = endpoint.asked(scope, b"")
            call.message, call.streams = asked.message, asked.events is not None
            options = options_of(asked.message)
            take_id(call, options)
            if watcher is not None:
                watcher.on_message(call)
            check_priority(options, principal)
            writer.events, writer.rename = asked.events, asked.rename
            async with _cancelled_with(receive), _deadline(call.context.time_remaining()):
                response = await self._limit.within(asked.behaviour(asked.message, call.context))
                if asked.events is None:
                    await writer.answer(asked.answer(response))
                else:
                    await writer.end()

    async def _body(self, scope: Scope, receive: Receive, hold: Hold) -> bytearray:
        """Raises MessageTooLarge, MessagesFull, SlowSender, InvalidRequest."""
        declared = _content_length(scope["headers"])
        if declared is not None:
            self._check_size(declared)
        expected = self._largest if declared is None else declared
        await hold.reserve(_BODY_COPIES * expected)
        body = await self._reads.within(self._pull(receive, expected))
        hold.arrived(len(body))
        return cast(bytearray, body)

    async def _asked(self, endpoint: Endpoint, scope: Scope, body: bytearray, hold: Hold) -> Asked:
        """Converts a request, after the images that it names by address are fetched. Raises InvalidRequest,
        UnsupportedImageError, MessagesFull."""
        fetcher = self._fetcher
        if fetcher is None or endpoint.parse is not None:
            return await _parsed(body, lambda: endpoint.asked(scope, body))
        fields = await _parsed(body, lambda: json_fields(body))
        wanted = places(fields.values)
        if wanted:
            await hold.reserve(_BODY_COPIES * (len(body) + self._guard.messages.largest))
            hold.arrived(len(body) + await fetcher.fill(wanted))
        return await _parsed(body, lambda: endpoint.read(fields))

    async def _pull(self, receive: Receive, most_bytes: int) -> bytearray:
        """Raises MessageTooLarge if more arrives than was reserved, whatever was declared."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if len(body) > most_bytes:
                self._check_size(len(body))
                raise MessageTooLarge("", f"the body has more than the declared {most_bytes} bytes")
            if not message.get("more_body"):
                return body

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._largest:
            raise MessageTooLarge(
                "", f"the body has {num_bytes} bytes or more, the limit is {self._largest}"
            )


class _Writer:
    """The response of one request. A write that the client does not read for ``limit_s`` seconds raises SlowReader."""

    def __init__(self, send: Send, limit_s: float | None, form: Form) -> None:
        self._send, self._limit_s, self._form = send, limit_s, form
        self.call: Call = cast(Call, None)
        self.events: Callable[[Any], Iterable[bytes]] | None = None
        self.rename: Rename = lambda path: path
        """Until the request is read, errors have the client's names of fields."""
        self.has_read_all = False
        """Whether the request's body was read to its end. Otherwise the connection can't be used again."""
        self._has_begun = False

    async def write(self, message: Any) -> None:
        """Sends the events of one message of a stream."""
        assert self.events is not None, "only streams write"
        await self._stream(b"".join(self.events(message)))

    async def end(self) -> None:
        """Ends a stream."""
        await self._stream(self._form.ending)
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, body: Any) -> None:
        """Sends a whole response."""
        if not isinstance(body, Whole):
            body = Whole(orjson.dumps(body), JSON)
        await self._whole(200, body)

    async def refuse(self, told: Told) -> None:
        """Sends an error: as a response, or as the last part of a stream that has begun."""
        if not self._has_begun:
            await self._whole(told.status, told.whole)
            return
        await self._stream(told.event)
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, status: int, body: Whole) -> None:
        kind = (b"content-type", body.content_type)
        length = (b"content-length", str(len(body.data)).encode())
        await self._begin(status, (kind, length, *body.headers))
        await self._put({"type": "http.response.body", "body": body.data, "more_body": False})

    async def _stream(self, data: bytes) -> None:
        if not data:
            return
        if not self._has_begun:
            kind = (b"content-type", self._form.stream_type)
            await self._begin(200, (kind, (b"cache-control", b"no-cache")))
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        ids = [(REQUEST_ID_KEY.encode(), self.call.request_id.encode())]
        if self.call.trace_id:
            ids.append((TRACE_ID_KEY.encode(), self.call.trace_id.encode()))
        close = () if self.has_read_all else ((b"connection", b"close"),)
        await self._put(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *ids, *close],
            }
        )

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReader(
                f"the client read nothing of its response for {self._limit_s:g} s"
            ) from None


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


def metadata_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Returns the headers in gRPC's form. A key in one of _KEY_HEADERS becomes a bearer token."""
    headers = list(headers)
    has_token = any(key == b"authorization" for key, _ in headers)
    metadata = []
    for key, value in headers:
        if key in _KEY_HEADERS:
            if not has_token:
                has_token = True
                metadata.append(("authorization", f"Bearer {value.decode('latin-1')}"))
            continue
        metadata.append((key.decode("latin-1"), value.decode("latin-1")))
    return tuple(metadata)


def _check_type(types: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UnsupportedBody. A browser sends text, forms and bodies without a type to another origin without asking
    the server. It asks before it sends any other type."""
    fields = dict(headers)
    given = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if given not in types or (not given and b"origin" in fields):
        named = " or ".join(each.decode() for each in types if each)
        raise UnsupportedBody(f"the request needs the header content-type: {named}")


def _check_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises InvalidRequest for a compressed body, which would unpack to more than the server has reserved."""
    for key, value in headers:
        if key == b"content-encoding" and value.lower() != b"identity":
            raise InvalidRequest(
                "", "the body is compressed; this server takes uncompressed bodies only"
            )


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the declared length of the body; None if there is none (a chunked body). Raises InvalidRequest."""
    for key, value in headers:
        if key == b"content-length":
            if not value.isdigit():
                raise InvalidRequest("", "the header content-length must be a whole number")
            return int(value)
    return None
