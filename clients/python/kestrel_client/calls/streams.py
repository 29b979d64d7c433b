"""A running stream: typed events, then the result. Both classes of streams read messages in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
    """What a stream needs once its call is open."""

    call: Any
    """gRPC's call object."""
    reading: Reading[R]
    reopen: Callable[[RpcError], Any]
    """Opens the call again after an error before its first message, if that can help. Raises the error if not."""


class _Stream(Generic[R, E]):
    """The state of a stream, and what its messages tell of the request."""

    def __init__(self) -> None:
        self._opened: OpenedStream[R]
        self._call: Any = None
        self._started: common_pb2.RequestInfo | None = None
        self._result: R | None = None
        self._error: KestrelError | None = None
        self._ended = False
        self._given_up = False

    @property
    def request_id(self) -> str | None:
        """The request's id; None before the first event."""
        return self._started.request_id if self._started else None

    @property
    def model(self) -> str | None:
        """Name of the model that answers; None before the first event."""
        return self._started.model if self._started else None

    @property
    def images(self) -> tuple[SeenImage, ...]:
        """The images of the request, in order; empty before the first event. A size that the server did not know at the
        first event is (0, 0)."""
        return tuple(map(read_seen_image, self._started.images)) if self._started else ()

    @property
    def seed(self) -> int | None:
        """The seed of the sampling; None before the first event."""
        return self._started.seed if self._started else None

    def _open(self, opened: OpenedStream[R]) -> None:
        self._opened, self._call = opened, opened.call

    def _take(self, message: Any) -> E | None:
        """Returns the event of a message, or None if the message has none."""
        kind = message.WhichOneof("event")
        if kind is None:
            return None  # an event of a newer server
        payload = getattr(message, kind)
        if kind == "started":
            self._started = payload
        elif kind == "final":
            self._result = self._opened.reading.result(payload)
        # The signature of each client method states the events of its stream. The messages can hold no others.
        return cast("E | None", self._opened.reading.event(message, payload))

    def _end(self, error: KestrelError | None = None) -> None:
        """Records the stream's end. Called once."""
        self._ended = True
        if error is None and self._result is None:
            error = IncompleteStreamError("the stream ended without its result")
        self._error = error

    def _check(self) -> None:
        """Raises the stream's error at the end of an iteration, but not if the caller closed the stream."""
        if self._error is not None and not self._given_up:
            raise self._error

    def _outcome(self) -> R:
        """Returns the result, or raises the stream's error."""
        if self._error is not None:
            raise self._error
        assert self._result is not None, "read before the stream's end"
        return self._result

    def _give_up(self) -> None:
        """Cancels the request if it is unfinished."""
        if self._call is not None:
            self._call.cancel()
        if not self._ended:
            self._given_up = True
            self._end(
                RequestCancelledError(
                    grpc.StatusCode.CANCELLED, "the stream was closed before its end"
                )
            )


class Stream(_Stream[R, E]):
    """An iterator of events with the whole result at the end. Not for several threads at once.

    Use it in ``with``: leaving the block early cancels the request on the server. ``result()`` may be called at once;
    it skips the events that were not read.
    """

    def __init__(self, start: Callable[[], OpenedStream[R]]) -> None:
        """Opens the stream with ``start``, and raises what it raises."""
        super().__init__()
        self._open(start())

    def __iter__(self) -> Stream[R, E]:
        return self

    def __next__(self) -> E:
        """The next event. Raises the call's error (see errors.py), or StopIteration after the last."""
        while not self._ended:
            try:
                message = next(self._call)
            except StopIteration:
                self._end()
            except grpc.RpcError as error:
                self._take_error(from_rpc_error(error))
            else:
                event = self._take(message)
                if event is not None:
                    return event
        self._check()
        raise StopIteration

    def _take_error(self, error: RpcError) -> None:
        """Opens the call again if that can help. Ends the stream if not."""
        try:
            if self._started is not None:
                raise error
            self._call = self._opened.reopen(error)
        except KestrelError as final:
            self._end(final)

    def result(self) -> R:
        """Waits for the stream's end and returns the whole result. Raises the call's error."""
        for _ in self:
            pass
        return self._outcome()

    def close(self) -> None:
        """Cancels the request if it is unfinished. May be called again."""
        self._give_up()

    def __enter__(self) -> Stream[R, E]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without this, the server would continue to compute a stream that was dropped without close().
        if self._call is not None and not self._ended:
            self._call.cancel()


class AsyncStream(_Stream[R, E]):
    """An async iterator of events with the whole result at the end.

    Use it in ``async with``: leaving the block early cancels the request on the server. ``await result()`` may be
    called at once; it skips the events that were not read. The first ``async with``, iteration or ``result()`` sends
    the request.
    """

    def __init__(self, start: Callable[[], Awaitable[OpenedStream[R]]]) -> None:
        super().__init__()
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> AsyncStream[R, E]:
        return self

    async def __anext__(self) -> E:
        """The next event. Raises the call's error (see errors.py), or StopAsyncIteration after the last."""
        if self._call is None and not self._ended:
            await self._send()
        while not self._ended:
            try:
                message = await cast(Any, self._call).read()
            except grpc.RpcError as error:
                await self._take_error(from_rpc_error(error))
                continue
            except asyncio.CancelledError:
                if self._given_up and not _task_is_cancelled():
                    break  # another task closed the stream
                self.cancel()
                raise
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in grpc-stubs
                self._end()
                break
            event = self._take(message)
            if event is not None:
                return event
        self._check()
        raise StopAsyncIteration

    async def _take_error(self, error: RpcError) -> None:
        """Opens the call again if that can help. Ends the stream if not."""
        try:
            if self._started is not None:
                raise error
            self._call = await self._opened.reopen(error)
        except KestrelError as final:
            if not self._ended:
                self._end(final)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._ended:  # Another task closed the stream in the meantime.
            self._call.cancel()

    async def result(self) -> R:
        """Waits for the stream's end and returns the whole result. Raises the call's error."""
        async for _ in self:
            pass
        return self._outcome()

    def cancel(self) -> None:
        """Cancels the request if it is unfinished. May be called again."""
        self._give_up()

    async def aclose(self) -> None:
        """As ``cancel()``."""
        self.cancel()

    async def _send(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open(await self._start())

    async def __aenter__(self) -> AsyncStream[R, E]:
        if self._call is None:
            await self._send()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # gRPC keeps an unread call alive, and the server continues to compute it. The collector may run in any thread.
        if self._call is not None and not self._ended and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._call.cancel)


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
