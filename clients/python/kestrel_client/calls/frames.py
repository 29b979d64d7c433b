"""Streams of frames, for both clients: frames go out as the server takes them, and results come back.

If the connection breaks, another stream continues. The server keeps nothing of a stream, so the frames that were under
way are lost, and their results say so.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import grpc

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..errors import STATUS_DROPPED, RpcError, UnavailableError, from_rpc_error
from ..images.image_forms import ImageInput
from ..values.frames import FrameResult, frame_result
from ..values.tasks import Task
from .frame_messages import ToImage, frame_bytes

FrameSource: TypeAlias = Iterable[ImageInput]
AsyncFrameSource: TypeAlias = Iterable[ImageInput] | AsyncIterable[ImageInput]

_MOST_ATTEMPTS = 6
"""Attempts to connect again, of which none gave a result, before the error is raised."""
_FIRST_PAUSE_S = 0.2

_END: Any = object()


class FrameCall(NamedTuple):
    """What a stream of frames needs besides the source."""

    config: pb.FramesConfig
    tasks: dict[str, Task]
    to_image: ToImage
    handling: dict[str, Any]
    """Keyword arguments for gRPC."""
    reconnect: bool


class _Frames:
    """The state that a stream keeps across connections."""

    def __init__(self, open_stream: Callable[..., Any], call: FrameCall) -> None:
        self._open_stream, self._frame_call = open_stream, call
        self._call: Any = None
        self._closed = False
        self._source_error: BaseException | None = None
        self._last_id = 0
        self._under_way: dict[int, ImageInput] = {}
        """Frames that were sent and have no response yet, by id."""
        self._results: deque[FrameResult] = deque()
        self._failures = 0
        self._connection = 0
        """The number of the connection, so that a sender of an earlier one stops."""
        self._unsent: list[ImageInput] = []
        """The frame that was taken from the source last, until it is sent. Another connection sends it."""

    def _opening(self) -> bytes:
        config = pb.FramesConfig()
        config.CopyFrom(self._frame_call.config)
        config.last_frame_id = self._last_id
        return pb.StreamFramesRequest(config=config).SerializeToString()

    def _next_frame(self, image: ImageInput) -> bytes:
        """Encodes ``image`` as the next frame. Blocks. ``_begin_frame`` must follow."""
        return frame_bytes(self._last_id + 1, image, self._frame_call.to_image)

    def _begin_frame(self, image: ImageInput) -> None:
        self._unsent.clear()
        self._last_id += 1
        self._under_way[self._last_id] = image

    def _take(self, response: pb.StreamFramesResponse) -> FrameResult:
        self._failures = 0
        source = self._under_way.pop(response.frame_id)
        return frame_result(response, self._frame_call.tasks, source)

    def _failed(self, error: grpc.RpcError) -> float:
        """Returns the seconds until the next attempt to connect. Raises the error if there is none."""
        if self._closed or self._source_error is not None:
            return 0.0
        self._connection += 1
        failure = from_rpc_error(error)
        self._failures += 1
        if not self._may_reconnect(failure):
            raise failure from error
        self._call = None
        for frame_id, source in self._under_way.items():
            self._results.append(FrameResult(frame_id=frame_id, dropped="lost", source=source))
        self._under_way.clear()
        return float(_FIRST_PAUSE_S * 2 ** (self._failures - 1))

    def _may_reconnect(self, error: RpcError) -> bool:
        return (
            self._frame_call.reconnect
            and (isinstance(error, UnavailableError) or error.message == STATUS_DROPPED)
            and self._failures <= _MOST_ATTEMPTS
        )


class Frames(_Frames):
    """An iterator of FrameResults, in the order in which the frames end. Not for several threads at once.

    gRPC's own thread reads the source. Use it in ``with``: leaving the block early ends the stream.
    """

    def __init__(
        self, open_stream: Callable[..., Any], call: FrameCall, source: FrameSource
    ) -> None:
        super().__init__(open_stream, call)
        self._source = iter(source)
        self._lock = threading.Lock()

    def __iter__(self) -> Frames:
        return self

    def __next__(self) -> FrameResult:
        """The next result. Raises the stream's error (see errors.py), or that of the source."""
        while not self._closed:
            if self._results:
                return self._results.popleft()
            if self._call is None:
                self._call = self._open_stream(
                    self._messages(self._connection), **self._frame_call.handling
                )
            try:
                return self._take(next(self._call))
            except StopIteration:
                self._closed = True
            except grpc.RpcError as error:
                time.sleep(self._failed(error))
                self._closed = self._closed or self._source_error is not None
        if self._source_error is not None:
            raise self._source_error
        raise StopIteration

    def close(self) -> None:
        """Ends the stream. May be called again."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _messages(self, connection: int) -> Iterator[bytes]:
        yield self._opening()
        try:
            while True:
                with self._lock:
                    if connection != self._connection or self._closed:
                        return
                    image = self._unsent[0] if self._unsent else next(self._source)
                    self._unsent = [image]
                    if connection != self._connection:
                        return
                    message = self._next_frame(image)
                    if connection != self._connection:  # Another one sends the frame.
                        return
                    self._begin_frame(image)
                yield message
        except StopIteration:
            return
        except GeneratorExit:
            raise
        except BaseException as error:
            self._source_error = error
            raise


class AsyncFrames(_Frames):
    """An async iterator of FrameResults, in the order in which the frames end.

    Use it in ``async with``: leaving the block early ends the stream. A source that is no async iterator is read in
    threads.
    """

    def __init__(
        self, open_stream: Callable[..., Any], call: FrameCall, source: AsyncFrameSource
    ) -> None:
        super().__init__(open_stream, call)
        self._source = aiter(
            source if isinstance(source, AsyncIterable) else _in_threads(iter(source))
        )
        self._lock = asyncio.Lock()
        self._reading: asyncio.Future[ImageInput] | None = None
        """Takes the next image from the source."""

    def __aiter__(self) -> AsyncFrames:
        return self

    async def __anext__(self) -> FrameResult:
        """The next result. Raises the stream's error (see errors.py), or that of the source."""
        while not self._closed:
            if self._results:
                return self._results.popleft()
            if self._call is None:
                self._call = await self._open_stream(
                    self._messages(self._connection), **self._frame_call.handling
                )
            try:
                response = await self._call.read()
                if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in grpc-stubs
                    self._closed = True
                    break
                return self._take(response)
            except grpc.RpcError as error:
                await asyncio.sleep(self._failed(error))
                self._closed = self._closed or self._source_error is not None
            except asyncio.CancelledError:
                if self._source_error is None:
                    self.cancel()
                    raise
                self._closed = True
        if self._source_error is not None:
            raise self._source_error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the stream. May be called again."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def aclose(self) -> None:
        """As ``cancel()``."""
        self.cancel()

    async def __aenter__(self) -> AsyncFrames:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def _messages(self, connection: int) -> AsyncIterator[bytes]:
        yield self._opening()
        try:
            while True:
                async with self._lock:
                    if connection != self._connection or self._closed:
                        return
                    image = self._unsent[0] if self._unsent else await self._next()
                    self._unsent = [image]
                    if connection != self._connection:
                        return
                    message = await asyncio.to_thread(self._next_frame, image)
                    if connection != self._connection:  # Another one sends the frame.
                        return
                    self._begin_frame(image)
                yield message
        except StopAsyncIteration:
            return
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._source_error = error
            raise

    async def _next(self) -> ImageInput:
        """The next image of the source. Raises StopAsyncIteration.

        The source is read in a task of its own, because gRPC cancels the sender of a connection that breaks, and a
        cancelled async generator ends. The next connection awaits the same task.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(anext(self._source))
        reading = self._reading
        image = await asyncio.shield(reading)
        self._reading = None
        return image


async def _in_threads(images: Iterator[ImageInput]) -> AsyncIterator[ImageInput]:
    while (image := await asyncio.to_thread(next, images, _END)) is not _END:
        yield image
