"""GrpcMethod: reads, answers and refuses the calls of one method by gRPC.

A call's id is returned in the initial metadata of an accepted call and in the trailers of a failed call, with
``x-trace-id`` if calls are traced. Initial metadata is sent only after the engine has accepted the request, because a
client does not retry a call after it has received initial metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import grpc

from ..security.admission.message_room import COPIES, Hold
from ..security.identity.front_headers import NOT_BEGUN
from .call_life import CallLife
from .calls.call import Call, CallLimit, Context
from .failures.errors import ModelNotReady, SlowReader
from .failures.statuses import row_of, status_of
from .messages.incoming import Incoming, Reading

Trailers = tuple[tuple[str, str | bytes], ...]

_LAST_WORD_S = 2.0
"""Seconds that a failed call waits until its status is sent."""
_ENTRY_BYTES = 32
"""Bytes that an entry of the metadata counts in addition to its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""


def write_limit(limit_s: float | None) -> CallLimit:
    """The limit on the time that a write of a stream waits for a slow reader."""
    return CallLimit(limit_s, _unread)


def _unread(limit_s: float) -> Exception:
    return SlowReader(f"the client did not read the stream for {limit_s:g} s; the server ended it")


class GrpcMethod:
    """``handler``: the service's. ``pulls``: limits the time in which a message must arrive. ``writes``: limits the
    time of a write, as ``write_limit`` does. ``copies``: of a message's bytes in memory. ``trailers``: returns
    additional trailers for the method's calls."""

    is_visit = False
    """As in Call."""

    def __init__(
        self,
        life: CallLife,
        method: str,
        handler: Any,
        *,
        pulls: CallLimit,
        writes: CallLimit,
        copies: int = COPIES,
        trailers: Callable[[str], Trailers] | None = None,
    ) -> None:
        self.life, self.method = life, method
        self._writes, self._trailers = writes, trailers
        self._ending: set[asyncio.Future[None]] = set()
        """gRPC gets the status of these calls when their initial metadata is sent, however late. They would not end
        without it."""
        self.behaviour = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        self._takes_stream = handler.request_streaming
        self._streams = handler.response_streaming
        decode = handler.request_deserializer
        self._empty = _empty(decode)
        self._reading = Reading(decode, life.guard.messages, pulls, copies)
        self.handler = reading_handler(
            self._handle, streams=self._streams, serializer=handler.response_serializer
        )

    async def _handle(self, _messages: Any, context: Context) -> Any:
        call = self._begin(context)
        # gRPC's core applies its limit only to clients that have acknowledged its settings, and to complete headers.
        num_bytes = _ENTRY_BYTES * len(call.metadata)
        for key, value in call.metadata:
            num_bytes += len(key) + len(value)
        if not self.life.guard.connections.note_metadata(num_bytes):
            return self._refuse_metadata(call, num_bytes)
        return await self.life.run(call, self, self._enter)

    def _begin(self, context: Context) -> Call:
        return self.life.begin(self.method, context, is_visit=self.is_visit, streams=self._streams)

    def _enter(self, call: Call) -> AbstractContextManager[Any]:
        return self.life.enter(call)

    async def read(self, call: Call, hold: Hold) -> Any:
        incoming = self.incoming(call, hold)
        if self._takes_stream:
            return incoming.all()
        return await incoming.only() if self._empty is None else self._empty()

    def incoming(self, call: Call, hold: Hold) -> Incoming:
        return Incoming(call.context, self._reading, hold, call.use)

    async def answer(self, call: Call, request: Any) -> Any:
        response = await self._respond(call, request)
        await call.accept()
        if self._trailers is not None:
            call.context.set_trailing_metadata(self._trailers(self.method))
        return response

    def _respond(self, call: Call, request: Any) -> Awaitable[Any]:
        if self._streams:
            return self._stream(call, request)
        answer: Awaitable[Any] = self.behaviour(request, call.context)
        return answer

    async def _stream(self, call: Call, request: Any) -> Any:
        writer = Writer(call, self._writes)
        answered = self.behaviour(request, cast(Context, writer))
        if not isinstance(answered, AsyncIterator):
            return await answered
        async for message in answered:
            await writer.write(message)

    async def refuse(self, call: Call, error: Exception) -> None:
        """Ends the call with the status of ``error``. Never returns."""
        trailers: Trailers = ()
        if isinstance(error, grpc.aio.InternalError):
            message = "the connection was lost"
        else:
            _, message, trailers = status_of(error, call.request_id)
        if isinstance(error, ModelNotReady):
            trailers = (*trailers, (NOT_BEGUN, "1"))
        extra = () if self._trailers is None else self._trailers(self.method)
        trailers = (*trailers, *call.ids, *extra)
        ending: Awaitable[None] = _end(call, (call.code, message, trailers))
        if call.is_greeting:
            task = asyncio.ensure_future(ending)
            self._ending.add(task)
            task.add_done_callback(self._ended)
            ending = asyncio.shield(task)
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await ending
        except (TimeoutError, grpc.aio.InternalError):
            # The client does not read, or its connection is closed. gRPC has the status and sends it after the unread
            # messages, or drops it with the connection. gRPC would log the traceback of any other exception.
            raise asyncio.CancelledError from None

    def _ended(self, ending: asyncio.Future[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            ending.exception()  # An AbortError, or that of a connection that is closed.

    def _refuse_metadata(self, call: Call, num_bytes: int) -> None:
        """Ends a call whose metadata has ``num_bytes``, which exceed the limit. An exception would keep the context in
        a reference cycle, and so the metadata that the core holds."""
        error = self.life.guard.connections.refuse_headers(call.peer, num_bytes)
        call.reason = row_of(error).reason
        call.code, message, trailers = status_of(error, call.request_id)
        call.context.set_code(call.code)
        call.context.set_details(message)
        call.context.set_trailing_metadata((*trailers, *call.ids))
        self.life.watchers.end(call)
        call.release()


async def _end(call: Call, status: tuple[grpc.StatusCode, str, Trailers]) -> None:
    """Gives gRPC the status after initial metadata. Raises AbortError, and InternalError if the client has gone."""
    context = call.context  # The call may be released in the meantime.
    await call.greeted()
    await context.abort(*status)


def reading_handler(handle: Callable[..., Any], *, streams: bool, serializer: Any) -> Any:
    """A handler of a method with a stream of requests, so that ``handle`` decides when to read them. ``streams``:
    whether the responses are a stream, too."""
    wrap = (
        grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    )
    return wrap(handle, response_serializer=serializer)


class WrappedContext:
    """A call's context, some of whose methods are others."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Writer(WrappedContext):
    """Limits the time of each write. gRPC accepts a message at once unless the reader is behind by a window. One task
    writes at a time."""

    def __init__(self, call: Call, writes: CallLimit) -> None:
        super().__init__(call.context)
        self._call, self._writes = call, writes

    async def write(self, message: Any) -> None:
        """Raises SlowReader."""
        await self._writes.within(self._write(message))

    async def _write(self, message: Any) -> None:
        self._call.greet(())  # gRPC would send it with the first message, whose time may end.
        await self._call.greeted()
        await self._context.write(message)


def _empty(decode: Callable[[bytes], Any] | None) -> Callable[[], Any] | None:
    """The type of a method's request if it has no fields, like GetLoad's, so that nothing must be read; otherwise
    None."""
    kind: Any = getattr(decode, "__self__", None)
    return None if kind is None or kind.DESCRIPTOR.fields else cast(Callable[[], Any], kind)
