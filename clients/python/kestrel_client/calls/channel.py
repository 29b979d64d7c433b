"""The gRPC channel of the synchronous clients."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import grpc

from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..connection import Connection
from ..errors import RpcError, from_rpc_error
from .frames import FrameCall, Frames, FrameSource
from .hedging import Hedges
from .prepared import Prepared, Stub
from .restoring import Repeats
from .streams import Stream

P = ParamSpec("P")
R = TypeVar("R")


class Channel:
    """Sends prepared calls of the ``stubs`` to one target. Safe to share between threads."""

    def __init__(self, connection: Connection, stubs: Iterable[Stub]) -> None:
        credentials, options = connection.credentials(), connection.options
        self._hedges = Hedges(connection.hedge_after)
        self._channel = (
            grpc.insecure_channel(connection.address, options)
            if credentials is None
            else grpc.secure_channel(connection.address, credentials, options)
        )
        # All are made at once: grpcio 1.81 crashes when a stub is made on a closed channel.
        self._stubs = {stub: stub(self._channel) for stub in stubs}

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
        try:
            response = self._answer(prepared)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return prepared.reading.result(response)

    def _answer(self, prepared: Prepared[R]) -> Any:
        """Sends a call, and once more if its answer is late. Raises grpc.RpcError."""
        stub = self._stubs[prepared.method.stub]
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
        stub = self._stubs[prepared.method.stub]

        def reopen(error: RpcError) -> Any:
            self._restore(prepared, error)
            return prepared.open_stream(stub)

        return Stream(prepared.open_stream(stub), prepared.reading, reopen)

    def frames(
        self,
        prepare: Callable[P, FrameCall],
        source: FrameSource,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Frames:
        """Opens a stream of frames when it is first read. Raises InvalidRequestError; the stream raises the rest."""
        open_stream = self._stubs[VisionServiceStub].StreamFrames
        return Frames(open_stream, prepare(*args, **kwargs), source)

    def close(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        self._channel.close()
