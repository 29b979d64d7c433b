"""A running stream: typed events, then the result. Both classes of streams read messages with the same reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import grpc

from .._pb.kestrel.v1 import common_pb2
from ..errors import (
    IncompleteStreamError,
    KestrelError,
    RequestCancelledError,
    RpcError,
    from_rpc_error,
)
from ..values.events import read_event
from ..values.results.text import SeenImage, read_seen_image

R = TypeVar("R")
E = TypeVar("E")


class Reading(NamedTuple, Generic[R]):
    """The functions that read the messages of a call."""

    result: Callable[[Any], R]
    """Reads the response of a unary call, or the final payload of a stream."""
    event: Callable[[Any, Any], Any] = lambda message, payload: read_event(payload)
    """Reads a message of a stream and its payload. Returns None for a message without an event for the caller."""


class OpenedStream(NamedTuple, Generic[R]):
    """What an asynchronous stream needs once its call is open."""

    call: Any
    """gRPC's call object."""
    reading: Reading[R]
    reopen: Callable[[RpcError], Awaitable[Any]]
    """Opens the call again after an error before its first message, if that can help. Raises the error if not."""


class _Reader(Generic[R, E]):
    """Reads a stream's messages one by one, and keeps the stream's state."""

    reading: Reading[R]
    """Set before the first message is taken."""

    def __init__(self) -> None:
        self.started: common_pb2.RequestInfo | None = None
        self.result: R | None = None
        self.error: KestrelError | None = None
        self.ended = False
        self.given_up = False

    def take(self, message: Any) -> E | None:
        """Returns the event of a message, or None if the message has none."""
        kind = message.WhichOneof("event")
        if kind is None:
            return None  # an event of a newer server
        payload = getattr(message, kind)
        if kind == "started":
            self.started = payload
        elif kind == "final":
            self.result = self.reading.result(payload)
        # The signature of each client method states the events of its stream. The messages can hold no others.
        return cast("E | None", self.reading.event(message, payload))

    def end(self, error: KestrelError | None = None) -> None:
        """Records the stream's end. Called once."""
        self.ended = True
        if error is None and self.result is None:
            error = IncompleteStreamError("the stream ended without its result")
        self.error = error

    def outcome(self) -> R:
        """Returns the result, or raises the stream's error."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "read before the stream's end"
        return self.result

    def failure(self) -> KestrelError | None:
        """The error that iteration raises at the end. None if the caller closed the stream."""
        return None if self.given_up else self.error

    def give_up(self) -> None:
        """Records that the caller closed the stream."""
        if not self.ended:
            self.given_up = True
            self.end(
                RequestCancelledError(
                    grpc.StatusCode.CANCELLED, "the stream was closed before its end"
                )
            )


class Stream(Generic[R, E]):
    """An iterator of events with the whole result at the end. Not for several threads at once.

    Use it in ``with``: leaving the block early cancels the request on the server. ``result()`` may be called at once;
    it
    skips the events that were not read.
    """

    def __init__(self, call: Any, reading: Reading[R], reopen: Callable[[RpcError], Any]) -> None:
        """``reopen``: as in OpenedStream, but synchronous."""
        self._call, self._reopen = call, reopen
        self._reader: _Reader[R, E] = _Reader()
        self._reader.reading = reading

    def __iter__(self) -> Stream[R, E]:
        return self

    def __next__(self) -> E:
        """The next event. Raises the call's error (see errors.py), or StopIteration after the last."""
        while not self._reader.ended:
            try:
                message = next(self._call)
            except StopIteration:
                self._reader.end()
            except grpc.RpcError as error:
                self._take_error(from_rpc_error(error))
            else:
                event = self._reader.take(message)
                if event is not None:
                    return event
        if (failure := self._reader.failure()) is not None:
            raise failure
        raise StopIteration

    def _take_error(self, error: RpcError) -> None:
        """Opens the call again if that can help. Ends the stream if not."""
        try:
            if self._reader.started is not None:
                raise error
            self._call = self._reopen(error)
        except KestrelError as final:
            self._reader.end(final)

    def result(self) -> R:
        """Waits for the stream's end and returns the whole result. Raises the call's error."""
        for _ in self:
            pass
        return self._reader.outcome()

    @property
    def request_id(self) -> str | None:
        """The request's id; None before the first event."""
        return self._reader.started.request_id if self._reader.started else None

    @property
    def model(self) -> str | None:
        """Name of the model that answers; None before the first event."""
        return self._reader.started.model if self._reader.started else None

    @property
    def images(self) -> tuple[SeenImage, ...]:
        """The images of the request, in order; empty before the first event. A size that the server did not know at the
        first event is (0, 0)."""
        started = self._reader.started
        return () if started is None else tuple(map(read_seen_image, started.images))

    @property
    def seed(self) -> int | None:
        """The seed of the sampling; None before the first event."""
        return self._reader.started.seed if self._reader.started else None

    def close(self) -> None:
        """Cancels the request if it is unfinished. May be called again."""
        self._call.cancel()
        self._reader.give_up()

    def __enter__(self) -> Stream[R, E]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Without this, the server would continue to compute a stream that was dropped without close().
        if not self._reader.ended:
            self._call.cancel()


class AsyncStream(Generic[R, E]):
    """An async iterator of events with the whole result at the end.

    Use it in ``async with``: leaving the block early cancels the request on the server. ``await result()`` may be
    called at once; it skips the events that were not read. The first ``async with``, iteration or ``result()`` sends
    the request.
    """

    def __init__(self, start: Callable[[], Awaitable[OpenedStream[R]]]) -> None:
        self._start = start
        self._call: Any = None
        self._reopen: Callable[[RpcError], Awaitable[Any]]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: _Reader[R, E] = _Reader()

    def __aiter__(self) -> AsyncStream[R, E]:
        return self

    async def __anext__(self) -> E:
        """The next event. Raises the call's error (see errors.py), or StopAsyncIteration after the last."""
        if self._call is None and not self._reader.ended:
            await self._open()
        while not self._reader.ended:
            try:
                message = await cast(Any, self._call).read()
            except grpc.RpcError as error:
                await self._take_error(from_rpc_error(error))
                continue
            except asyncio.CancelledError:
                if self._reader.given_up and not _task_is_cancelled():
                    break  # another task closed the stream
                self.cancel()
                raise
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in grpc-stubs
                self._reader.end()
                break
            event = self._reader.take(message)
            if event is not None:
                return event
        if (failure := self._reader.failure()) is not None:
            raise failure
        raise StopAsyncIteration

    async def result(self) -> R:
        """Waits for the stream's end and returns the whole result. Raises the call's error."""
        async for _ in self:
            pass
        return self._reader.outcome()

    @property
    def request_id(self) -> str | None:
        """The request's id; None before the first event."""
        return self._reader.started.request_id if self._reader.started else None

    @property
    def model(self) -> str | None:
        """Name of the model that answers; None before the first event."""
        return self._reader.started.model if self._reader.started else None

    @property
    def images(self) -> tuple[SeenImage, ...]:
        """The images of the request, in order; empty before the first event. A size that the server did not know at the
        first event is (0, 0)."""
        started = self._reader.started
        return () if started is None else tuple(map(read_seen_image, started.images))

    @property
    def seed(self) -> int | None:
        """The seed of the sampling; None before the first event."""
        return self._reader.started.seed if self._reader.started else None

    def cancel(self) -> None:
        """Cancels the request if it is unfinished. May be called again."""
        if self._call is not None:
            self._call.cancel()
        self._reader.give_up()

    async def aclose(self) -> None:
        """As ``cancel()``."""
        self.cancel()

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._call, self._reader.reading, self._reopen = await self._start()

    async def _take_error(self, error: RpcError) -> None:
        """Opens the call again if that can help. Ends the stream if not."""
        try:
            if self._reader.started is not None:
                raise error
            self._call = await self._reopen(error)
        except KestrelError as final:
            if not self._reader.ended:
                self._reader.end(final)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._reader.ended:  # Another task closed the stream in the meantime.
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream[R, E]:
        if self._call is None:
            await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # gRPC keeps an unread call alive, and the server continues to compute it. The collector may run in any thread.
        if self._call is not None and not self._reader.ended and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._call.cancel)


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
