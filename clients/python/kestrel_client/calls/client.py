"""The synchronous client. Safe to share between threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

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
from .batches import Progress, run_bounded
from .requests import CallOptions, CaptionLength, HandlingOptions, Prepared, Preparer
from .streams import Stream

R = TypeVar("R")
M = TypeVar("M", bound=Message)
T = TypeVar("T", bound=Result)


class KestrelClient:
    """Talks to one Kestrel server. Usable in ``with``; else ``close()`` it.

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
        credentials, options = self._connection.credentials(), self._connection.options
        self._channel = (
            grpc.insecure_channel(self._connection.address, options)
            if credentials is None
            else grpc.secure_channel(self._connection.address, credentials, options)
        )
        self._vision = vision_service_pb2_grpc.VisionServiceStub(self._channel)
        self._images = image_service_pb2_grpc.ImageServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)

    def query(
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
        sent = self._prepare.query(image, question, reasoning, spatial_refs, options)
        return self._call(self._vision.Query, sent)

    def caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        **options: Unpack[CallOptions],
    ) -> CaptionResult:
        """Describes a picture; ``length``: "short", "normal" or "long"."""
        sent = self._prepare.caption(image, length, options)
        return self._call(self._vision.Caption, sent)

    def point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> PointResult:
        """Finds the centre of every object of a kind, like "red circle"."""
        sent = self._prepare.point(image, object, max_objects, spatial_refs, options)
        return self._call(self._vision.Point, sent)

    def detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        **options: Unpack[CallOptions],
    ) -> DetectResult:
        """Finds the bounding box of every object of a kind."""
        sent = self._prepare.detect(image, object, max_objects, options)
        return self._call(self._vision.Detect, sent)

    def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Iterable[SpatialRef] = (),
        mask: MaskFormat = "none",
        **options: Unpack[CallOptions],
    ) -> SegmentResult:
        """Outlines one object. ``mask``: encoding of a mask to send beside the path."""
        sent = self._prepare.segment(image, object, spatial_refs, mask, options)
        return self._call(self._vision.Segment, sent)

    def stream_query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> Stream[QueryResult, TextDelta | ReasoningDelta]:
        """``query`` with the text as it is written."""
        sent = self._prepare.query(image, question, reasoning, spatial_refs, options)
        return self._stream(self._vision.StreamQuery, pb.StreamQueryRequest, sent)

    def stream_caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        **options: Unpack[CallOptions],
    ) -> Stream[CaptionResult, TextDelta]:
        """``caption`` with the text as it is written."""
        sent = self._prepare.caption(image, length, options)
        return self._stream(self._vision.StreamCaption, pb.StreamCaptionRequest, sent)

    def stream_point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Iterable[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> Stream[PointResult, Point]:
        """``point`` with each point as soon as it is found."""
        sent = self._prepare.point(image, object, max_objects, spatial_refs, options)
        return self._stream(self._vision.StreamPoint, pb.StreamPointRequest, sent)

    def stream_detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[DetectResult, Box]:
        """``detect`` with each box as soon as it is found."""
        sent = self._prepare.detect(image, object, max_objects, options)
        return self._stream(self._vision.StreamDetect, pb.StreamDetectRequest, sent)

    def stream_segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Iterable[SpatialRef] = (),
        mask: MaskFormat = "none",
        **options: Unpack[CallOptions],
    ) -> Stream[SegmentResult, Box | PathPiece]:
        """``segment`` with the box first and then the path, piece by piece."""
        sent = self._prepare.segment(image, object, spatial_refs, mask, options)
        return self._stream(self._vision.StreamSegment, pb.StreamSegmentRequest, sent)

    def put_image(
        self,
        image: ImageInput,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> ImageHandle:
        """Sends a picture once, to be named by the handle in later calls; large files go in pieces."""
        put = prepare_put(image, self._connection.max_message_bytes)
        options: dict[str, Any] = self._handling(timeout, metadata)
        try:
            if put.data:
                return read_handle(
                    self._images.UploadImage(put.pieces(), **options).image, put.source
                )
            return read_handle(self._images.PutImage(put.request, **options).image, put.source)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def delete_image(
        self,
        image: ImageHandle | str,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> bool:
        """Makes the server forget a picture; whether it had it."""
        request = image_service_pb2.DeleteImageRequest(image_id=image_id_of(image))
        try:
            options: dict[str, Any] = self._handling(timeout, metadata)
            return self._images.DeleteImage(request, **options).existed
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> AnalyzeResult:
        """Does several tasks on one picture at once, like ``[QueryTask("What is this?"), DetectTask("circle")]``.

        A task that fails leaves the others alone: see AnalyzeResult.
        """
        return self._call(self._vision.Analyze, self._prepare.analyze(image, tasks, options))

    def stream_analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> Stream[AnalyzeResult, TaskEvent | TaskDone]:
        """``analyze`` with the events of all tasks as they happen."""
        sent = self._prepare.analyze(image, tasks, options)
        return self._stream(self._vision.StreamAnalyze, pb.StreamAnalyzeRequest, sent)

    def map(
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

        def work(image: ImageInput) -> Any:
            method, sent = self._prepare.task(image, cast(Task, task), options)
            return self._call(getattr(self._vision, method), sent)

        return run_bounded(images, work, concurrency, progress)

    def run_skill(
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
        sent = self._prepare.run_skill(skill, image, arguments, settings, options)
        return self._call(self._vision.RunSkill, sent)

    def stream_skill(
        self,
        skill: str,
        image: ImageInput | None = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[SkillResult, Event]:
        """``run_skill`` with the events of the skill as they happen."""
        sent = self._prepare.run_skill(skill, image, arguments, settings, options)
        return self._stream(self._vision.StreamSkill, pb.StreamSkillRequest, sent)

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the server serves, the default one first."""
        sent = model_service_pb2.ListModelsRequest()
        reply = self._ask(self._models.ListModels, sent, timeout)
        return tuple(map(read_model, reply.models))

    def get_model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """One model; default: the server's default model. Raises NotFoundError."""
        sent = model_service_pb2.GetModelRequest(name=name)
        return read_model(self._ask(self._models.GetModel, sent, timeout).model)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's versions, limits and capabilities."""
        sent = model_service_pb2.GetServerInfoRequest()
        return read_server_info(self._ask(self._models.GetServerInfo, sent, timeout))

    def server_load(self, *, timeout: float | None = None) -> ServerLoad:
        """How busy the server is, for those who choose between several."""
        sent = model_service_pb2.GetLoadRequest()
        return read_load(self._ask(self._models.GetLoad, sent, timeout))

    def wait_ready(self, timeout: float = 60.0, *, service: str = "") -> None:
        """Waits until the server is up and answers requests, by gRPC's health protocol.

        ``timeout``: seconds; DeadlineExceededError when they have passed. ``service``: "" for the server as a whole.
        """
        check = self._channel.unary_unary(
            HEALTH_CHECK_METHOD,
            request_serializer=wire_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=wire_pb2.HealthCheckResponse.FromString,
        )
        deadline = time.monotonic() + timeout
        metadata = self._connection.call_metadata(None)
        while (left := deadline - time.monotonic()) > 0:
            try:
                reply = check(
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
            time.sleep(min(0.1, left))
        raise DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the server at {self._connection.target} was not ready within {timeout:g} s",
        )

    def close(self) -> None:
        """Closes the connection; calls that still run are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> KestrelClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: grpc.UnaryUnaryMultiCallable[Any, Any], sent: Prepared[Any, R]) -> R:
        try:
            reply = method(sent.request, timeout=sent.timeout, metadata=sent.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return sent.reading.result(reply)

    def _stream(
        self,
        method: grpc.UnaryStreamMultiCallable[Any, Any],
        wrapper: type[Message],
        sent: Prepared[Any, R],
    ) -> Stream[R, Any]:
        request = wrapper(request=sent.request)
        call = method(request, timeout=sent.timeout, metadata=sent.metadata)
        return Stream(call, sent.reading)

    def _handling(self, timeout: float | None, metadata: Metadata | None) -> dict[str, Any]:
        return {
            "timeout": self._connection.call_timeout(timeout),
            "metadata": self._connection.call_metadata(metadata),
        }

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Any, M], sent: Message, timeout: float | None
    ) -> M:
        try:
            return method(sent, **self._handling(timeout, None))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
