"""VisionService: the five skills, each as one answer and as a stream.

A unary call is a stream whose deltas nobody reads. However a call ends, by its result, an error, the caller's
cancellation or a deadline, ``finally`` gives the engine's request up, which frees its pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceServicer
from kestrel_engine import EngineResult, EngineStream, InferenceEngine, InvalidRequest

from . import convert
from .convert import SkillCall
from .drawn_mask import add_mask
from .interceptors import Context, current_call
from .served_model import ServedModel

_Response = TypeVar("_Response")
_Respond = Callable[[EngineResult, int], _Response]


class VisionService(VisionServiceServicer):
    """Holds no state of its own."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        return await self._answer(convert.query_call(request), convert.query_response)

    async def Caption(self, request: pb.CaptionRequest, context: Context) -> pb.CaptionResponse:
        return await self._answer(convert.caption_call(request), convert.caption_response)

    async def Point(self, request: pb.PointRequest, context: Context) -> pb.PointResponse:
        return await self._answer(convert.point_call(request), convert.point_response)

    async def Detect(self, request: pb.DetectRequest, context: Context) -> pb.DetectResponse:
        return await self._answer(convert.detect_call(request), convert.detect_response)

    async def Segment(self, request: pb.SegmentRequest, context: Context) -> pb.SegmentResponse:
        return await self._answer(convert.segment_call(request), convert.segment_response)

    # The streams write to the context instead of yielding: an async generator that is blocked in a yield is closed
    # only when it is collected, a coroutine is cancelled at once.

    async def StreamQuery(  # type: ignore[override]
        self, request: pb.StreamQueryRequest, context: Context
    ) -> None:
        call = convert.query_call(_inner(request))
        await self._stream(call, context, pb.StreamQueryResponse, convert.query_response)

    async def StreamCaption(  # type: ignore[override]
        self, request: pb.StreamCaptionRequest, context: Context
    ) -> None:
        call = convert.caption_call(_inner(request))
        await self._stream(call, context, pb.StreamCaptionResponse, convert.caption_response)

    async def StreamPoint(  # type: ignore[override]
        self, request: pb.StreamPointRequest, context: Context
    ) -> None:
        call = convert.point_call(_inner(request))
        await self._stream(call, context, pb.StreamPointResponse, convert.point_response)

    async def StreamDetect(  # type: ignore[override]
        self, request: pb.StreamDetectRequest, context: Context
    ) -> None:
        call = convert.detect_call(_inner(request))
        await self._stream(call, context, pb.StreamDetectResponse, convert.detect_response)

    async def StreamSegment(  # type: ignore[override]
        self, request: pb.StreamSegmentRequest, context: Context
    ) -> None:
        call = convert.segment_call(_inner(request))
        await self._stream(call, context, pb.StreamSegmentResponse, convert.segment_response)

    async def _answer(self, call: SkillCall, respond: _Respond[_Response]) -> _Response:
        engine = self._served.engine(call.model)
        stream = await _submit(engine, call)
        try:
            await current_call().accept()
            return await _respond(engine, call, await stream.result(), respond)
        finally:
            await stream.aclose()

    async def _stream(
        self, call: SkillCall, context: Context, event: Callable[..., Any], respond: _Respond[Any]
    ) -> None:
        engine = self._served.engine(call.model)
        stream = await _submit(engine, call)
        try:
            await current_call().accept()
            started = pb.StreamStarted(request_id=stream.request_id, model=engine.info.model)
            await context.write(event(sequence=0, started=started))
            sequence = 1
            async for update in stream:
                await context.write(event(sequence=sequence, **convert.event(update)))
                sequence += 1
            final = await _respond(engine, call, await stream.result(), respond)
            await context.write(event(sequence=sequence, final=final))
        finally:
            await stream.aclose()


async def _submit(engine: InferenceEngine, call: SkillCall) -> EngineStream:
    """With the caller's deadline, so that nothing is computed for a request whose caller has gone."""
    current = current_call()
    return await engine.submit(
        call.skill,
        call.image,
        call.arguments,
        call.settings,
        request_id=current.request_id,
        priority=call.priority,
        timeout_s=current.context.time_remaining(),
    )


async def _respond(
    engine: InferenceEngine, call: SkillCall, result: EngineResult, respond: _Respond[_Response]
) -> _Response:
    current_call().result = result
    response = respond(result, engine.info.image_positions)
    if isinstance(response, pb.SegmentResponse):
        await add_mask(response, call.mask_format)
    return response


def _inner(request: Any) -> Any:
    """The request within a stream's request."""
    if not request.HasField("request"):
        raise InvalidRequest("", "is required")
    return request.request
