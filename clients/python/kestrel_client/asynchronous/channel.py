"""The gRPC channel of the asynchronous clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from ..calls.frame_messages import FramesStub
from ..calls.frames import AsyncFrames, AsyncFrameSource, FrameCall
from ..calls.hedging import Hedges
from ..calls.open_channel import OpenChannel, async_servers
from ..calls.prepared_call import Method, PreparedCall, Stub, prepare_call
from ..calls.restoring import Repeats
from ..calls.streams import AsyncStream, OpenedStream, Reading
from ..connection import Connection
from ..errors import RpcError, from_rpc_error

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClosing:
    """A client that owns a channel."""

    _channel: AsyncChannel

    async def aclose(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        await self._channel.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncChannel:
    """Sends calls of the ``stubs`` to one target from one event loop."""

    def __init__(self, connection: Connection, stubs: Iterable[Stub]) -> None:
        self._connection = connection
        self._hedges = Hedges(connection.hedge_after)
        self._servers = async_servers(connection, tuple(stubs))

    async def ask(
        self, method: Method, request: Message, timeout: float | None, **handling: Any
    ) -> Any:
        """Sends a call without an image, and returns its response. Raises what errors.py lists."""
        prepared = prepare_call(self._connection, method, request, timeout=timeout, **handling)
        return await self.send(prepared)

    async def call(
        self, prepare: Callable[P, PreparedCall[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Prepares a call with ``prepare(*args, **kwargs)`` and sends it. Raises what errors.py lists.

        Preparing may read a file or fetch an address, so an event loop leaves it to a thread.
        """
        return await self.send(await asyncio.to_thread(prepare, *args, **kwargs))

    async def send(self, prepared: PreparedCall[R]) -> R:
        """Sends a call and returns its result. Raises RpcError.

        Repeats a call whose connection was lost, and puts images again that the server does not know.
        """
        repeats = Repeats()
        while True:
            try:
                return await self._send(prepared)
            except RpcError as error:
                if (pause_s := repeats.pause_s(prepared, error)) is None:
                    await self._restore(prepared, error)
                else:
                    await asyncio.sleep(pause_s)

    async def _restore(self, prepared: PreparedCall[R], error: RpcError) -> None:
        """Puts the images of a call again, so that it can be sent again. Raises ``error`` if that does not help."""
        if (restoring := prepared.restoring) is None:
            raise error
        for image_id, put in await asyncio.to_thread(restoring.puts, error, prepared.left):
            restoring.stored(image_id, await self._send(put))

    async def _send(self, prepared: PreparedCall[R]) -> R:
        opened = await self._take()
        try:
            stub = opened.stubs[prepared.method.stub]
            response = await self._hedges.async_answer(prepared, stub)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            opened.done()
        return prepared.reading.result(response)

    def stream(
        self, prepare: Callable[P, PreparedCall[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncStream[R, Any]:
        """A stream of the call that ``prepare(*args, **kwargs)`` prepares. It raises the errors of the call."""

        async def start() -> OpenedStream[R]:
            prepared = await asyncio.to_thread(prepare, *args, **kwargs)

            async def reopen(error: RpcError) -> Any:
                await self._restore(prepared, error)
                return await self._open_stream(prepared)

            return OpenedStream(await self._open_stream(prepared), prepared.reading, reopen)

        return AsyncStream(start)

    async def _open_stream(self, prepared: PreparedCall[R]) -> Any:
        opened = await self._take()
        stub = opened.stubs[prepared.method.stub]
        return opened.stream(lambda: prepared.open_stream(stub))

    async def messages(
        self,
        method: Method,
        request: Message,
        read: Callable[[Any], R],
        timeout: float | None,
    ) -> AsyncIterator[R]:
        """What ``read`` makes of the messages of a stream without events. ``timeout``: None for no limit. Raises
        RpcError."""
        connection = self._connection
        handling = {
            "timeout": None if timeout is None else connection.call_timeout(timeout),
            "metadata": connection.call_metadata(None, ""),
        }
        prepared = PreparedCall(method, request, Reading(read), handling)
        call = await self._open_stream(prepared)
        try:
            async for message in call:
                yield read(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def frames(
        self,
        prepare: Callable[P, FrameCall],
        source: AsyncFrameSource,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncFrames:
        """Opens a stream of frames when it is first read. Raises InvalidRequestError; the stream raises the rest."""

        async def open_stream(messages: Any, **handling: Any) -> Any:
            opened = await self._take()
            stub = opened.stubs[FramesStub]
            return opened.stream(lambda: stub.StreamFrames(messages, **handling))

        return AsyncFrames(open_stream, prepare(*args, **kwargs), source)

    async def aclose(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        for channel in self._servers.close():
            await channel.close()

    async def _take(self) -> OpenChannel:
        """The channel for a call. Closes those that no call uses any more."""
        for channel in self._servers.idle():
            await channel.close()
        return self._servers.take()
