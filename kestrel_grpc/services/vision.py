"""VisionService: the five skills, RunSkill, Analyze and Embed, each as a unary call and as a stream, and StreamFrames.

A unary call runs the same request as a stream, without reading its updates. When a call ends by its result, an error,
a cancellation or a deadline, ``finally`` closes the engine's stream, which frees the request's pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceServicer
from kestrel_engine import EngineResult, StreamUpdate

from ..edge.calls.call import Context
from ..edge.calls.current_call import current_call
from ..images.request_images import RequestImages
from ..served_model import ServedModels
from .answers.analysis import Send, analyze
from .answers.frames import answer_frame
from .answers.several_objects import find_several
from .answers.several_samples import TextResponse, check_single, draw_samples, num_samples
from .answers.starting import Respond, Response, Starter
from .messages.calls import (
    SkillCall,
    caption_call,
    detect_call,
    point_call,
    query_call,
    segment_call,
)
from .messages.embeddings import embed_call, embed_events, embed_final, embed_response
from .messages.named_skill import check_skill, located, skill_call, skill_event, skill_response
from .messages.responses import (
    caption_response,
    detect_response,
    event_fields,
    point_response,
    query_response,
    segment_response,
)

_Event = Callable[[StreamUpdate], dict[str, Any]]
_Rest = Callable[[EngineResult], Iterable[Mapping[str, Any]]]


class VisionService(VisionServiceServicer):
    """Holds no state besides a Starter. ``max_message_bytes``: limit on a response; None: no limit."""

    def __init__(
        self, served: ServedModels, images: RequestImages, max_message_bytes: int | None = None
    ) -> None:
        self._starter = Starter(served, images)
        self._max_message_bytes = max_message_bytes

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        return await self._samples(request, query_call(request), query_response)

    async def Caption(self, request: pb.CaptionRequest, context: Context) -> pb.CaptionResponse:
        return await self._samples(request, caption_call(request), caption_response)

    async def Point(self, request: pb.PointRequest, context: Context) -> pb.PointResponse:
        if request.objects:
            return await find_several(self._starter, request)
        return await self._answer(point_call(request), point_response)

    async def Detect(self, request: pb.DetectRequest, context: Context) -> pb.DetectResponse:
        if request.objects:
            return await find_several(self._starter, request)
        return await self._answer(detect_call(request), detect_response)

    async def Segment(self, request: pb.SegmentRequest, context: Context) -> pb.SegmentResponse:
        return await self._answer(segment_call(request), segment_response)

    # The streams write to the context instead of yielding. A coroutine is cancelled at once, but an async generator
    # that waits in a yield is closed only when it is collected.

    async def StreamQuery(  # type: ignore[override]
        self, request: pb.QueryRequest, context: Context
    ) -> None:
        check_single(request)
        call = query_call(request)
        await self._stream(call, context, pb.StreamQueryResponse, query_response)

    async def StreamCaption(  # type: ignore[override]
        self, request: pb.CaptionRequest, context: Context
    ) -> None:
        check_single(request)
        call = caption_call(request)
        await self._stream(call, context, pb.StreamCaptionResponse, caption_response)

    async def StreamPoint(  # type: ignore[override]
        self, request: pb.PointRequest, context: Context
    ) -> None:
        if request.objects:
            send = _sender(context, pb.StreamPointResponse)
            await send("", {"final": await find_several(self._starter, request, send)})
            return
        call = point_call(request)
        await self._stream(call, context, pb.StreamPointResponse, point_response)

    async def StreamDetect(  # type: ignore[override]
        self, request: pb.DetectRequest, context: Context
    ) -> None:
        if request.objects:
            send = _sender(context, pb.StreamDetectResponse)
            await send("", {"final": await find_several(self._starter, request, send)})
            return
        call = detect_call(request)
        await self._stream(call, context, pb.StreamDetectResponse, detect_response)

    async def StreamSegment(  # type: ignore[override]
        self, request: pb.SegmentRequest, context: Context
    ) -> None:
        call = segment_call(request)
        await self._stream(call, context, pb.StreamSegmentResponse, segment_response)

    async def Analyze(self, request: pb.AnalyzeRequest, context: Context) -> pb.AnalyzeResponse:
        return await analyze(self._starter, request)

    async def StreamAnalyze(  # type: ignore[override]
        self, request: pb.AnalyzeRequest, context: Context
    ) -> None:
        send = _sender(context, pb.StreamAnalyzeResponse)
        final = await analyze(self._starter, request, send)
        await send("", {"final": final})

    async def RunSkill(self, request: pb.RunSkillRequest, context: Context) -> pb.RunSkillResponse:
        with located(request):
            return await self._answer(self._skill_call(request), skill_response)

    async def StreamSkill(  # type: ignore[override]
        self, request: pb.RunSkillRequest, context: Context
    ) -> None:
        with located(request):
            call = self._skill_call(request)
            await self._stream(call, context, pb.StreamSkillResponse, skill_response, skill_event)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        return await self._answer(embed_call(request, self._max_message_bytes), embed_response)

    async def StreamEmbed(  # type: ignore[override]
        self, request: pb.EmbedRequest, context: Context
    ) -> None:
        call = embed_call(request, self._max_message_bytes, streamed=True)
        await self._stream(call, context, pb.StreamEmbedResponse, embed_final, rest=embed_events)

    async def StreamFrames(  # type: ignore[override]
        self, request: pb.StreamFramesRequest, context: Context
    ) -> None:
        """Answers one frame of the stream. edge/request_streams.py divides the stream."""
        await answer_frame(self._starter, request, context)

    def _skill_call(self, request: pb.RunSkillRequest) -> SkillCall:
        call = skill_call(request)
        check_skill(call.skill, self._starter.served.engine(call.options.model).info.skills)
        return call

    async def _samples(
        self,
        request: pb.QueryRequest | pb.CaptionRequest,
        call: SkillCall,
        respond: Respond[TextResponse],
    ) -> TextResponse:
        count = num_samples(request)
        if count == 1:
            return await self._answer(call, respond)
        return await draw_samples(self._starter, call, count, respond)

    async def _answer(self, call: SkillCall, respond: Respond[Response]) -> Response:
        started = await self._starter.start(call)
        try:
            await current_call().accept()
            return await self._starter.finish(started, respond)
        finally:
            await started.stream.aclose()

    async def _stream(
        self,
        call: SkillCall,
        context: Context,
        response: Callable[..., Any],
        respond: Respond[Any],
        event: _Event = event_fields,
        rest: _Rest = lambda result: (),
    ) -> None:
        """``rest``: the events that follow from the result."""
        started = await self._starter.start(call)
        stream = started.stream
        try:
            await current_call().accept()
            begun = pb.StreamStarted(request_id=stream.request_id, model=started.engine.info.model)
            await context.write(response(sequence=0, started=begun))
            sequence = 1
            async for update in stream:
                await context.write(response(sequence=sequence, **event(update)))
                sequence += 1
            final = await self._starter.finish(started, respond)
            for fields in rest(await stream.result()):
                await context.write(response(sequence=sequence, **fields))
                sequence += 1
            await context.write(response(sequence=sequence, final=final))
        finally:
            await stream.aclose()


def _sender(context: Context, response: Callable[..., Any]) -> Send:
    """Writes the events of several tasks as messages of one stream."""
    sequence, writing = 0, asyncio.Lock()
    failure: Exception | None = None

    async def send(key: str, event: dict[str, Any]) -> None:
        nonlocal sequence, failure
        # gRPC allows one write at a time, and none after one that was given up.
        async with writing:
            if failure is not None:
                raise failure
            try:
                await context.write(response(sequence=sequence, key=key, **event))
            except Exception as error:
                failure = error
                raise
            sequence += 1

    return send
