"""The gRPC channel of the asynchronous clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio

from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..calls.frames import AsyncFrames, AsyncFrameSource, FrameCall
from ..calls.hedging import Hedges
from ..calls.opened import Opened, Servers
from ..calls.prepared import Prepared, Stub
from ..calls.restoring import Repeats
from ..calls.streams import AsyncStream, OpenedStream
from ..connection import Connection
from ..errors import RpcError, from_rpc_error

P = ParamSpec("P")
R = TypeVar("R")


class AsyncChannel:
    """Sends prepared calls of the ``stubs`` to one target from one event loop."""

    def __init__(self, connection: Connection, stubs: Iterable[Stub]) -> None:
        credentials = connection.credentials()

        def open_channel(to: Connection) -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(to.address, to.options)
            return grpc.aio.secure_channel(to.address, credentials, to.options)

        self._hedges = Hedges(connection.hedge_after)
        # A channel belongs to the loop that uses it first. It is opened there, not here.
        self._servers = Servers(connection, tuple(stubs), open_channel)

    async def call(self, prepare: Callable[P, Prepared[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Prepares a call with ``prepare(*args, **kwargs)`` in a thread and sends it. Raises what errors.py lists.

        The thread is for calls with an image, which may be a file or an http(s) address. Other calls use ``send``.
        """
        return await self.send(await asyncio.to_thread(prepare, *args, **kwargs))

    async def send(self, prepared: Prepared[R]) -> R:
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

    async def _restore(self, prepared: Prepared[R], error: RpcError) -> None:
        """Puts the images of a call again, so that it can be sent again. Raises ``error`` if that does not help."""
        if (restoring := prepared.restoring) is None:
            raise error
        # In a thread, because this may read files.
        puts = await asyncio.to_thread(lambda: list(restoring.puts(error, prepared.left)))
        for image_id, put in puts:
            restoring.stored(image_id, await self._send(put))

    async def _send(self, prepared: Prepared[R]) -> R:
        opened = await self._take()
        try:
            response = await self._answer(prepared, opened.stub(prepared.method.stub))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            opened.done()
        return prepared.reading.result(response)

    async def _answer(self, prepared: Prepared[R], stub: Any) -> Any:
        """Sends a call, and once more if its answer is late. Raises grpc.RpcError."""
        delay_s = self._hedges.delay_s(prepared)
        if delay_s is None:
            return await prepared.send(stub)

        async def ask(call: Prepared[R]) -> Any:
            return await call.send(stub)

        asked = [asyncio.ensure_future(ask(prepared))]
        try:
            done, left = await asyncio.wait(asked, timeout=delay_s)
            if not done and (second := self._hedges.second(prepared)) is not None:
                asked.append(asyncio.ensure_future(ask(second)))
                left.add(asked[1])
            while left:  # The first answer counts. An error waits for the other call.
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    if each.exception() is None:
                        return each.result()
            return asked[0].result()
        finally:
            for each in asked:
                each.cancel()

    def stream(
        self, prepare: Callable[P, Prepared[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncStream[R, Any]:
        """A stream that prepares its call in a thread when it is first used, and raises all errors of the call."""

        async def start() -> OpenedStream[R]:
            prepared = await asyncio.to_thread(prepare, *args, **kwargs)

            async def reopen(error: RpcError) -> Any:
                await self._restore(prepared, error)
                return await self._open_stream(prepared)

            return OpenedStream(await self._open_stream(prepared), prepared.reading, reopen)

        return AsyncStream(start)

    async def _open_stream(self, prepared: Prepared[R]) -> Any:
        opened = await self._take()
        stub = opened.stub(prepared.method.stub)
        return opened.stream(lambda: prepared.open_stream(stub))

    def frames(
        self,
        prepare: Callable[P, FrameCall],
        source: AsyncFrameSource,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncFrames:
        """Opens a stream of frames when it is first read. Raises InvalidRequestError; the stream raises the rest."""

        def open_stream(messages: Any, **handling: Any) -> Any:
            opened = self._servers.take()
            stub = opened.stub(VisionServiceStub)
            return opened.stream(lambda: stub.StreamFrames(messages, **handling))

        return AsyncFrames(open_stream, prepare(*args, **kwargs), source)

    async def aclose(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        for channel in self._servers.close():
            await channel.close(None)

    async def _take(self) -> Opened:
        """The channel for a call. Closes those that no call uses any more."""
        for channel in self._servers.idle():
            await channel.close(None)
        return self._servers.take()
