# Generated from asynchronous/channel.py by generate_sync.py. Never edit; run `make protos`.
"""The gRPC channel of the synchronous clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from ..calls.frame_messages import FramesStub
from ..calls.frames import FrameCall, Frames, FrameSource
from ..calls.hedging import Hedges
from ..calls.open_channel import OpenChannel, servers
from ..calls.prepared_call import Method, PreparedCall, Stub, prepare_call
from ..calls.restoring import Repeats
from ..calls.streams import OpenedStream, Reading, Stream
from ..connection import Connection
from ..errors import RpcError, from_rpc_error

P = ParamSpec("P")
R = TypeVar("R")


class Closing:
    """A client that owns a channel."""

    _channel: Channel

    def close(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channel:
    """Sends calls of the ``stubs`` to one target. Safe to share between threads."""

    def __init__(self, connection: Connection, stubs: Iterable[Stub]) -> None:
        self._connection = connection
        self._hedges = Hedges(connection.hedge_after)
        self._servers = servers(connection, tuple(stubs))

    def ask(self, method: Method, request: Message, timeout: float | None, **handling: Any) -> Any:
        """Sends a call without an image, and returns its response. Raises what errors.py lists."""
        prepared = prepare_call(self._connection, method, request, timeout=timeout, **handling)
        return self.send(prepared)

    def call(self, prepare: Callable[P, PreparedCall[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Prepares a call with ``prepare(*args, **kwargs)`` and sends it. Raises what errors.py lists.

        Preparing may read a file or fetch an address, so an event loop leaves it to a thread.
        """
        return self.send(prepare(*args, **kwargs))

    def send(self, prepared: PreparedCall[R]) -> R:
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

    def _restore(self, prepared: PreparedCall[R], error: RpcError) -> None:
        """Puts the images of a call again, so that it can be sent again. Raises ``error`` if that does not help."""
        if (restoring := prepared.restoring) is None:
            raise error
        for image_id, put in restoring.puts(error, prepared.left):
            restoring.stored(image_id, self._send(put))

    def _send(self, prepared: PreparedCall[R]) -> R:
        opened = self._take()
        try:
            stub = opened.stubs[prepared.method.stub]
            response = self._hedges.answer(prepared, stub)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            opened.done()
        return prepared.reading.result(response)

    def stream(
        self, prepare: Callable[P, PreparedCall[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R, Any]:
        """A stream of the call that ``prepare(*args, **kwargs)`` prepares. It raises the errors of the call."""

        def start() -> OpenedStream[R]:
            prepared = prepare(*args, **kwargs)

            def reopen(error: RpcError) -> Any:
                self._restore(prepared, error)
                return self._open_stream(prepared)

            return OpenedStream(self._open_stream(prepared), prepared.reading, reopen)

        return Stream(start)

    def _open_stream(self, prepared: PreparedCall[R]) -> Any:
        opened = self._take()
        stub = opened.stubs[prepared.method.stub]
        return opened.stream(lambda: prepared.open_stream(stub))

    def messages(
        self,
        method: Method,
        request: Message,
        read: Callable[[Any], R],
        timeout: float | None,
    ) -> Iterator[R]:
        """What ``read`` makes of the messages of a stream without events. ``timeout``: None for no limit. Raises
        RpcError."""
        connection = self._connection
        handling = {
            "timeout": None if timeout is None else connection.call_timeout(timeout),
            "metadata": connection.call_metadata(None, ""),
        }
        prepared = PreparedCall(method, request, Reading(read), handling)
        call = self._open_stream(prepared)
        try:
            for message in call:
                yield read(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

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
            stub = opened.stubs[FramesStub]
            return opened.stream(lambda: stub.StreamFrames(messages, **handling))

        return Frames(open_stream, prepare(*args, **kwargs), source)

    def close(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        for channel in self._servers.close():
            channel.close()

    def _take(self) -> OpenChannel:
        """The channel for a call. Closes those that no call uses any more."""
        for channel in self._servers.idle():
            channel.close()
        return self._servers.take()
