"""The asynchronous client, for one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message

from .._pb.kestrel.client.internal import wire_pb2
from .._pb.kestrel.v1 import (
    image_service_pb2,
    image_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    vision_service_pb2_grpc,
)
from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    HEALTH_CHECK_METHOD,
    ChannelOptions,
    Connection,
    Metadata,
    Tls,
)
from ..drawing.marks import MaskFormat
from ..errors import DeadlineExceededError, KestrelError, from_rpc_error
from ..images.images import ImageHandle, ImageInput
from ..images.stored import image_id_of, prepare_put, read_handle
from ..values.description import (
    Model,
    ServerInfo,
    ServerLoad,
    read_load,
    read_model,
    read_server_info,
)
from ..values.events import Event, PathPiece, ReasoningDelta, TextDelta
from ..values.geometry import Box, Point, SpatialRef
from ..values.results import (
    CaptionResult,
    DetectResult,
    PointResult,
    QueryResult,
    Result,
    SegmentResult,
    SkillResult,
)
from ..values.tasks import AnalyzeResult, Task, TaskDone, TaskEvent, TaskOf, Tasks
from .batches import Progress, gather_bounded
from .requests import CallOptions, CaptionLength, HandlingOptions, Prepared, Preparer
from .streams import AsyncStream, Reading

R = TypeVar("R")
T = TypeVar("T", bound=Result)


class _Opened(NamedTuple):
    """A channel and its stubs. The stubs' types don't tell a channel's kind at run time, so they stay untyped."""

    channel: grpc.aio.Channel
    vision: Any
    images: Any
    models: Any


class AsyncKestrelClient:
    """Talks to one Kestrel server from one event loop. Usable in ``async with``; else ``await aclose()`` it.

    ``target``: ``host:port``, ``unix:path`` or any gRPC target. ``tls``: True for public certificates, or a Tls.
    ``token``: sent as a bearer token; without TLS only to this machine. ``timeout``: seconds a call may take unless it
    says otherwise, None for no limit. ``metadata``: sent with every call. ``max_message_bytes``: limit in either
    direction, checked before sending; the server has its own. ``channel_options``: gRPC's, after our own.

    Every method raises what errors.py lists. Arguments that all skills take are described at CallOptions.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        metadata: Metadata | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        channel_options: ChannelOptions = (),
    ) -> None:
        self._connection = Connection(
            target=target,
            tls=tls,
            token=token,
            timeout=timeout,
            metadata=metadata,
            max_message_bytes=max_message_bytes,
            channel_options=channel_options,
        )
        self._prepare = Preparer(self._connection)
        self._credentials = self._connection.credentials()
        # The channel belongs to the loop that first uses it, so it is opened there and not here.
        self._opened: _Opened | None = None

    async def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> QueryResult:
        """Answers a question about a picture, or without one (``image=None``).

        ``reasoning``: let the model think aloud first. ``spatial_refs``: places that the question refers to.
        """
        return await self._call(
            "Query", lambda: self._prepare.query(image, question, reasoning, spatial_refs, options)
        )

    async def caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        **options: Unpack[CallOptions],
    ) -> CaptionResult:
        """Describes a picture; ``length``: "short", "normal" or "long"."""
        return await self._call("Caption", lambda: self._prepare.caption(image, length, options))

    async def point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> PointResult:
        """Finds the centre of every object of a kind, like "red circle"."""
        return await self._call(
            "Point", lambda: self._prepare.point(image, object, max_objects, spatial_refs, options)
        )

    async def detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        **options: Unpack[CallOptions],
    ) -> DetectResult:
        """Finds the bounding box of every object of a kind."""
        return await self._call(
            "Detect", lambda: self._prepare.detect(image, object, max_objects, options)
        )

    async def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Iterable[SpatialRef] = (),
        mask: MaskFormat = "none",
        **options: Unpack[CallOptions],
    ) -> SegmentResult:
        """Outlines one object. ``mask``: encoding of a mask to send beside the path."""
        return await self._call(
            "Segment", lambda: self._prepare.segment(image, object, spatial_refs, mask, options)
        )

    def stream_query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> AsyncStream[QueryResult, TextDelta | ReasoningDelta]:
        """``query`` with the text as it is written."""
        return self._stream(
            "StreamQuery",
            pb.StreamQueryRequest,
            lambda: self._prepare.query(image, question, reasoning, spatial_refs, options),
        )

    def stream_caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        **options: Unpack[CallOptions],
    ) -> AsyncStream[CaptionResult, TextDelta]:
        """``caption`` with the text as it is written."""
        return self._stream(
            "StreamCaption",
            pb.StreamCaptionRequest,
            lambda: self._prepare.caption(image, length, options),
        )

    def stream_point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> AsyncStream[PointResult, Point]:
        """``point`` with each point as soon as it is found."""
        return self._stream(
            "StreamPoint",
            pb.StreamPointRequest,
            lambda: self._prepare.point(image, object, max_objects, spatial_refs, options),
        )

    def stream_detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream[DetectResult, Box]:
        """``detect`` with each box as soon as it is found."""
        return self._stream(
            "StreamDetect",
            pb.StreamDetectRequest,
            lambda: self._prepare.detect(image, object, max_objects, options),
        )

    def stream_segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Iterable[SpatialRef] = (),
        mask: MaskFormat = "none",
        **options: Unpack[CallOptions],
    ) -> AsyncStream[SegmentResult, Box | PathPiece]:
        """``segment`` with the box first and then the path, piece by piece."""
        return self._stream(
            "StreamSegment",
            pb.StreamSegmentRequest,
            lambda: self._prepare.segment(image, object, spatial_refs, mask, options),
        )

    async def put_image(
        self,
        image: ImageInput,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> ImageHandle:
        """Sends a picture once, to be named by the handle in later calls; large files go in pieces."""
        put = await asyncio.to_thread(prepare_put, image, self._connection.max_message_bytes)
        images, options = self._open().images, self._handling(timeout, metadata)
        try:
            if put.data:
                reply = await images.UploadImage(put.pieces(), **options)
            else:
                reply = await images.PutImage(put.request, **options)
            return read_handle(reply.image, put.source)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def delete_image(
        self,
        image: ImageHandle | str,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> bool:
        """Makes the server forget a picture; whether it had it."""
        request = image_service_pb2.DeleteImageRequest(image_id=image_id_of(image))
        try:
            options = self._handling(timeout, metadata)
            reply = await self._open().images.DeleteImage(request, **options)
            return bool(reply.existed)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> AnalyzeResult:
        """Does several tasks on one picture at once, like ``[QueryTask("What is this?"), DetectTask("circle")]``.

        A task that fails leaves the others alone: see AnalyzeResult.
        """
        return await self._call("Analyze", lambda: self._prepare.analyze(image, tasks, options))

    def stream_analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> AsyncStream[AnalyzeResult, TaskEvent | TaskDone]:
        """``analyze`` with the events of all tasks as they happen."""
        return self._stream(
            "StreamAnalyze",
            pb.StreamAnalyzeRequest,
            lambda: self._prepare.analyze(image, tasks, options),
        )

    async def map(
        self,
        images: Iterable[ImageInput],
        task: TaskOf[T],
        *,
        concurrency: int = 8,
        progress: Progress | None = None,
        **options: Unpack[HandlingOptions],
    ) -> list[T | KestrelError]:
        """Does one task, like ``DetectTask("circle")``, on each of many images; results in the order of the images.

        At most ``concurrency`` requests run at once, and an iterator is read only as fast. What fails leaves its
        KestrelError in place of its result. ``progress(done, total)`` is called after each image, ``total`` is None for
        an iterator.
        """

        async def work(image: ImageInput) -> Any:
            prepared = await asyncio.to_thread(self._prepare.task, image, cast(Task, task), options)
            return await self._call(prepared[0], lambda: prepared[1])

        return await gather_bounded(images, work, concurrency, progress)

    async def run_skill(
        self,
        skill: str,
        image: ImageInput | None = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> SkillResult:
        """Runs any skill of the model by name, also one that was plugged into the server.

        ``arguments`` and ``settings`` are the skill's own: plain values by name. Raises NotFoundError for a skill that
        there isn't.
        """
        return await self._call(
            "RunSkill",
            lambda: self._prepare.run_skill(skill, image, arguments, settings, options),
        )

    def stream_skill(
        self,
        skill: str,
        image: ImageInput | None = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream[SkillResult, Event]:
        """``run_skill`` with the events of the skill as they happen."""
        return self._stream(
            "StreamSkill",
            pb.StreamSkillRequest,
            lambda: self._prepare.run_skill(skill, image, arguments, settings, options),
        )

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the server serves, the default one first."""
        sent = model_service_pb2.ListModelsRequest()
        reply = await self._ask("ListModels", sent, timeout)
        return tuple(map(read_model, reply.models))

    async def get_model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """One model; default: the server's default model. Raises NotFoundError."""
        sent = model_service_pb2.GetModelRequest(name=name)
        reply = await self._ask("GetModel", sent, timeout)
        return read_model(reply.model)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's versions, limits and capabilities."""
        sent = model_service_pb2.GetServerInfoRequest()
        return read_server_info(await self._ask("GetServerInfo", sent, timeout))

    async def server_load(self, *, timeout: float | None = None) -> ServerLoad:
        """How busy the server is, for those who choose between several."""
        sent = model_service_pb2.GetLoadRequest()
        return read_load(await self._ask("GetLoad", sent, timeout))

    async def wait_ready(self, timeout: float = 60.0, *, service: str = "") -> None:
        """Waits until the server is up and answers requests, by gRPC's health protocol.

        ``timeout``: seconds; DeadlineExceededError when they have passed. ``service``: "" for the server as a whole.
        """
        check = self._open().channel.unary_unary(
            HEALTH_CHECK_METHOD,
            request_serializer=wire_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=wire_pb2.HealthCheckResponse.FromString,
        )
        deadline = time.monotonic() + timeout
        metadata = self._connection.call_metadata(None)
        while (left := deadline - time.monotonic()) > 0:
            try:
                reply = await check(
                    wire_pb2.HealthCheckRequest(service=service),
                    timeout=self._connection.call_timeout(left),
                    metadata=metadata,
                    wait_for_ready=True,
                )
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if failure.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise failure from error
                break
            if reply.status == wire_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(min(0.1, left))
        raise DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the server at {self._connection.target} was not ready within {timeout:g} s",
        )

    async def aclose(self) -> None:
        """Closes the connection; calls that still run are cancelled. Idempotent."""
        if self._opened is not None:
            await self._opened.channel.close(None)

    async def __aenter__(self) -> AsyncKestrelClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _open(self) -> _Opened:
        if self._opened is None:
            target, options = self._connection.address, self._connection.options
            channel = (
                grpc.aio.insecure_channel(target, options)
                if self._credentials is None
                else grpc.aio.secure_channel(target, self._credentials, options)
            )
            self._opened = _Opened(
                channel,
                vision_service_pb2_grpc.VisionServiceStub(channel),
                image_service_pb2_grpc.ImageServiceStub(channel),
                model_service_pb2_grpc.ModelServiceStub(channel),
            )
        return self._opened

    async def _call(self, method: str, prepare: Callable[[], Prepared[Any, R]]) -> R:
        sent = await asyncio.to_thread(prepare)
        call = getattr(self._open().vision, method)
        try:
            reply = await call(sent.request, timeout=sent.timeout, metadata=sent.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return sent.reading.result(reply)

    def _stream(
        self, method: str, wrapper: type[Message], prepare: Callable[[], Prepared[Any, R]]
    ) -> AsyncStream[R, Any]:
        async def start() -> tuple[Any, Reading[R]]:
            sent = await asyncio.to_thread(prepare)
            request = wrapper(request=sent.request)
            call = getattr(self._open().vision, method)
            return call(request, timeout=sent.timeout, metadata=sent.metadata), sent.reading

        return AsyncStream(start)

    def _handling(self, timeout: float | None, metadata: Metadata | None) -> dict[str, Any]:
        return {
            "timeout": self._connection.call_timeout(timeout),
            "metadata": self._connection.call_metadata(metadata),
        }

    async def _ask(self, method: str, sent: Message, timeout: float | None) -> Any:
        call = getattr(self._open().models, method)
        try:
            return await call(sent, **self._handling(timeout, None))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
