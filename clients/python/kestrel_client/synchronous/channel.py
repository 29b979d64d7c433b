"""The gRPC channel of the synchronous clients."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import grpc

from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..calls.frames import FrameCall, Frames, FrameSource
from ..calls.hedging import Hedges
from ..calls.opened import Opened, Servers
from ..calls.prepared import Prepared, Stub
from ..calls.restoring import Repeats
from ..calls.streams import Stream
from ..connection import Connection
from ..errors import RpcError, from_rpc_error

P = ParamSpec("P")
R = TypeVar("R")


class Channel:
    """Sends prepared calls of the ``stubs`` to one target. Safe to share between threads."""

    def __init__(self, connection: Connection, stubs: Iterable[Stub]) -> None:
        credentials = connection.credentials()

        def open_channel(to: Connection) -> grpc.Channel:
            if credentials is None:
                return grpc.insecure_channel(to.address, to.options)
            return grpc.secure_channel(to.address, credentials, to.options)

        self._hedges = Hedges(connection.hedge_after)
        self._servers = Servers(connection, tuple(stubs), open_channel)
        self._servers.take().done()  # Reports now what is wrong.

    def call(self, prepare: Callable[P, Prepared[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Prepares a call with ``prepare(*args, **kwargs)`` and sends it. Raises what errors.py lists."""
        return self.send(prepare(*args, **kwargs))

    def send(self, prepared: Prepared[R]) -> R:
        """Sends a call and returns its result. Raises RpcError.

        Repeats a call whose connection was lost, and puts images again that the server does not know.
        """
        repeats = Repeats()
        while True:
            try:
                return self._send(prepared)
            except RpcError as error:
                if (pause_s := repeats.pause_s(prepared, error)) is None:
                    self._restore(prepared, error)
                else:
                    time.sleep(pause_s)

    def _restore(self, prepared: Prepared[R], error: RpcError) -> None:
        """Puts the images of a call again, so that it can be sent again. Raises ``error`` if that does not help."""
        if (restoring := prepared.restoring) is None:
            raise error
        for image_id, put in restoring.puts(error, prepared.left):
            restoring.stored(image_id, self._send(put))

    def _send(self, prepared: Prepared[R]) -> R:
        opened = self._take()
        try:
            response = self._answer(prepared, opened.stub(prepared.method.stub))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            opened.done()
        return prepared.reading.result(response)

    def _answer(self, prepared: Prepared[R], stub: Any) -> Any:
        """Sends a call, and once more if its answer is late. Raises grpc.RpcError."""
        delay_s = self._hedges.delay_s(prepared)
        if delay_s is None:
            return prepared.send(stub)
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = [prepared.begin(stub)]
        asked[0].add_done_callback(ended.put)
        try:
            try:
                first = ended.get(timeout=delay_s)
            except queue.Empty:
                if (second := self._hedges.second(prepared)) is not None:
                    asked.append(second.begin(stub))
                    asked[1].add_done_callback(ended.put)
                first = ended.get()
            if first.code() is grpc.StatusCode.OK or len(asked) == 1:
                return first.result()
            # The first answer counts. An error waits for the other call.
            last = ended.get()
            return (last if last.code() is grpc.StatusCode.OK else asked[0]).result()
        finally:
            for each in asked:
                each.cancel()

    def stream(
        self, prepare: Callable[P, Prepared[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R, Any]:
        """Prepares a call and opens its stream. Raises InvalidRequestError; the stream raises the other errors."""
        prepared = prepare(*args, **kwargs)

        def reopen(error: RpcError) -> Any:
            self._restore(prepared, error)
            return self._open_stream(prepared)

        return Stream(self._open_stream(prepared), prepared.reading, reopen)

    def _open_stream(self, prepared: Prepared[R]) -> Any:
        opened = self._take()
        stub = opened.stub(prepared.method.stub)
        return opened.stream(lambda: prepared.open_stream(stub))

    def frames(
        self,
        prepare: Callable[P, FrameCall],
        source: FrameSource,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Frames:
        """Opens a stream of frames when it is first read. Raises InvalidRequestError; the stream raises the rest."""

        def open_stream(messages: Any, **handling: Any) -> Any:
            opened = self._take()
            stub = opened.stub(VisionServiceStub)
            return opened.stream(lambda: stub.StreamFrames(messages, **handling))

        return Frames(open_stream, prepare(*args, **kwargs), source)

    def close(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        for channel in self._servers.close():
            channel.close()

    def _take(self) -> Opened:
        """The channel for a call. Closes those that no call uses any more."""
        for channel in self._servers.idle():
            channel.close()
        return self._servers.take()
