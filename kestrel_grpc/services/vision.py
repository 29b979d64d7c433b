"""VisionService: the six skills, RunSkill, Analyze and Embed, each as a unary call and as a stream, StreamFrames and
CountTokens.

A unary call runs the same requests as a stream, without reading their updates.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceServicer

from ..edge.calls.call import Context
from ..edge.calls.current import current
from ..images.request_images import RequestImages, images_of
from ..served_model import ServedModels
from .answers.analysis import analyze
from .answers.counting import count_tokens
from .answers.frames import answer_frame
from .answers.kinds import (
    CAPTION,
    DETECT,
    GAZE,
    POINT,
    QUERY,
    SEGMENT,
    SKILL,
    CallTask,
    Kind,
    Response,
    embed_kind,
)
from .answers.run import Run, Sender
from .answers.several import total_result


def _unary(kind: Kind[Any, Any]) -> Any:
    """The method of a skill with one response."""

    def method(self: VisionService, request: Any, context: Context) -> Awaitable[Any]:
        return self._answer(request, kind)

    return method


def _stream(kind: Kind[Any, Any], message: type[Any]) -> Any:
    """The method of a skill with a stream. It writes to the context instead of yielding: a coroutine is cancelled at
    once, but an async generator that waits in a yield is closed only when it is collected."""

    async def method(self: VisionService, request: Any, context: Context) -> None:
        await self._stream(request, kind, Sender(context, message))

    return method


class VisionService(VisionServiceServicer):
    """Holds no state of a call. ``max_message_bytes``: limit on a response; None: no limit."""

    def __init__(
        self, served: ServedModels, images: RequestImages, max_message_bytes: int | None = None
    ) -> None:
        self._served, self._images = served, images
        self._embed = embed_kind(max_message_bytes, streamed=False)
        self._stream_embed = embed_kind(max_message_bytes, streamed=True)

    Query = _unary(QUERY)
    Caption = _unary(CAPTION)
    Point = _unary(POINT)
    Detect = _unary(DETECT)
    Segment = _unary(SEGMENT)
    Gaze = _unary(GAZE)
    RunSkill = _unary(SKILL)
    StreamQuery = _stream(QUERY, pb.StreamQueryResponse)
    StreamCaption = _stream(CAPTION, pb.StreamCaptionResponse)
    StreamPoint = _stream(POINT, pb.StreamPointResponse)
    StreamDetect = _stream(DETECT, pb.StreamDetectResponse)
    StreamSegment = _stream(SEGMENT, pb.StreamSegmentResponse)
    StreamGaze = _stream(GAZE, pb.StreamGazeResponse)
    StreamRunSkill = _stream(SKILL, pb.StreamRunSkillResponse)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        return await self._answer(request, self._embed)

    async def StreamEmbed(  # type: ignore[override]
        self, request: pb.EmbedRequest, context: Context
    ) -> None:
        await self._stream(request, self._stream_embed, Sender(context, pb.StreamEmbedResponse))

    async def Analyze(self, request: pb.AnalyzeRequest, context: Context) -> pb.AnalyzeResponse:
        return await analyze(Run(self._served, self._images), request)

    async def StreamAnalyze(  # type: ignore[override]
        self, request: pb.AnalyzeRequest, context: Context
    ) -> None:
        sender = Sender(context, pb.StreamAnalyzeResponse)
        run = Run(self._served, self._images, sender=sender)
        await sender.send({"final": await analyze(run, request)})

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context
    ) -> pb.CountTokensResponse:
        return await count_tokens(Run(self._served, self._images, keeps_images=False), request)

    async def StreamFrames(  # type: ignore[override]
        self, request: pb.StreamFramesRequest, context: Context
    ) -> None:
        """Answers one frame of the stream. edge/request_streams.py divides the stream."""
        await answer_frame(self._served, self._images, request.frame, context)

    async def _answer(
        self, request: Any, kind: Kind[Any, Response], sender: Sender | None = None
    ) -> Response:
        run = Run(self._served, self._images, sender=sender)
        task = CallTask(kind, getattr(request, kind.name), (kind.name,))
        await run.images.find(images_of(request))
        response, results = await run.answer(task)
        call = current.get()
        if call.result is None:
            call.result = total_result(call.request_id, [result.metrics for result in results])
        return response

    async def _stream(self, request: Any, kind: Kind[Any, Any], sender: Sender) -> None:
        await sender.send({"final": await self._answer(request, kind, sender)})
