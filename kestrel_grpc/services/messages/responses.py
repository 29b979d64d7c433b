"""From the engine's results and updates to messages: pure functions. Coordinates are clipped to the image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from kestrel_engine import EngineMetrics, EngineResult, StreamUpdate, TokenLogprob

_FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


def query_response(result: EngineResult, image_positions: int) -> vision_service_pb2.QueryResponse:
    output = result.output
    reasoning = None
    if "reasoning" in output:
        # The message counts code points, as Python's indices into str do.
        reasoning = vision_service_pb2.Reasoning(
            text=output["reasoning"]["text"],
            grounding=[
                vision_service_pb2.GroundingSpan(
                    start=span["start_idx"],
                    end=span["end_idx"],
                    points=[point_message({"x": x, "y": y}) for x, y in span["points"]],
                )
                for span in output["reasoning"]["grounding"]
            ],
            # A reasoning that did not end was ended with the request.
            finish_reason=_FINISH_REASONS[
                output["reasoning"]["finish_reason"] or result.finish_reason
            ],
        )
    return vision_service_pb2.QueryResponse(
        answer=output["answer"],
        reasoning=reasoning,
        absences=[
            vision_service_pb2.ObjectAbsence(object=each.object, absence=each.absence)
            for each in result.absences
        ],
        abstained=result.abstained,
        logprobs=logprobs_message(result),
        **shared_fields(result, image_positions),
    )


def caption_response(
    result: EngineResult, image_positions: int
) -> vision_service_pb2.CaptionResponse:
    return vision_service_pb2.CaptionResponse(
        caption=result.output["caption"],
        logprobs=logprobs_message(result),
        **shared_fields(result, image_positions),
    )


def point_response(result: EngineResult, image_positions: int) -> vision_service_pb2.PointResponse:
    return vision_service_pb2.PointResponse(
        points=[point_message(found) for found in result.output["points"]],
        absence=result.absence,
        **shared_fields(result, image_positions),
    )


def detect_response(
    result: EngineResult, image_positions: int
) -> vision_service_pb2.DetectResponse:
    return vision_service_pb2.DetectResponse(
        objects=[box_message(found) for found in result.output["objects"]],
        absence=result.absence,
        **shared_fields(result, image_positions),
    )


def segment_response(
    result: EngineResult, image_positions: int
) -> vision_service_pb2.SegmentResponse:
    """The response without its mask, which takes time to draw: see drawn_mask.py."""
    segment = result.output["segments"][0]
    return vision_service_pb2.SegmentResponse(
        svg_path=segment["svg_path"],
        box=box_message(segment["bbox"]) if "bbox" in segment else None,
        score=segment.get("score"),
        parse_error=segment.get("parse_error"),
        coarse_path=segment["coarse_path"] if segment.get("refined") else None,
        coarse_box=box_message(segment["coarse_bbox"]) if segment.get("refined") else None,
        **shared_fields(result, image_positions),
    )


def event_fields(update: StreamUpdate) -> dict[str, Any]:
    """The one field of a stream event that holds the update, by name."""
    tokens = update.token_index
    if update.text or update.tokens:
        delta = vision_service_pb2.TextDelta(text=update.text, output_tokens=tokens)
        if update.tokens:
            delta.tokens.extend(map(token_logprob, update.tokens))
        return {"text_delta": delta}
    if update.reasoning:
        thought = vision_service_pb2.ReasoningDelta(text=update.reasoning, output_tokens=tokens)
        return {"reasoning_delta": thought}
    if update.path:
        return {"path_piece": vision_service_pb2.PathPiece(path=update.path, output_tokens=tokens)}
    assert update.object is not None, "an update without a payload"
    return {
        "object": box_message(update.object)
        if "x_min" in update.object
        else point_message(update.object)
    }


def logprobs_message(result: EngineResult) -> common_pb2.Logprobs | None:
    """None unless the request asked for them."""
    if result.logprobs is None:
        return None
    total = math.fsum(token.logprob for token in result.logprobs)
    return common_pb2.Logprobs(
        tokens=map(token_logprob, result.logprobs),
        sum=total,
        mean=total / max(1, len(result.logprobs)),
    )


def token_logprob(token: TokenLogprob) -> common_pb2.TokenLogprob:
    message = common_pb2.TokenLogprob(
        text=token.text, utf8=token.utf8, id=token.id, logprob=token.logprob
    )
    add = message.top.add  # Messages that are made elsewhere would be copied.
    for each in token.top:
        add(text=each.text, utf8=each.utf8, id=each.id, logprob=each.logprob)
    return message


def point_message(found: Mapping[str, float]) -> common_pb2.Point:
    return common_pb2.Point(x=_clip(found["x"]), y=_clip(found["y"]), score=found.get("score"))


def box_message(found: Mapping[str, float]) -> common_pb2.Box:
    """The part of the box that lies in the image. It is never empty, because a box's centre lies in the image."""
    return common_pb2.Box(
        x_min=_clip(found["x_min"]),
        y_min=_clip(found["y_min"]),
        x_max=_clip(found["x_max"]),
        y_max=_clip(found["y_max"]),
        score=found.get("score"),
    )


def usage_message(metrics: EngineMetrics, image_tokens: int) -> common_pb2.Usage:
    return common_pb2.Usage(
        input_tokens=metrics.input_tokens,
        output_tokens=metrics.output_tokens,
        cached_tokens=metrics.cached_tokens,
        image_tokens=image_tokens,
        reasoning_tokens=metrics.reasoning_tokens,
    )


def timings_of_several(metrics: EngineMetrics, total_time_ms: float) -> common_pb2.Timings:
    """Those of a call with several requests. ``metrics``: of all together."""
    return common_pb2.Timings(
        queue_time_ms=rounded_ms(metrics.queue_time_ms),
        ttft_ms=rounded_ms(metrics.ttft_ms),
        total_time_ms=rounded_ms(total_time_ms),
    )


def timings_message(metrics: EngineMetrics) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_time_ms=rounded_ms(metrics.queue_time_ms),
        preprocess_time_ms=rounded_ms(metrics.preprocess_time_ms),
        prefill_time_ms=rounded_ms(metrics.prefill_time_ms),
        decode_time_ms=rounded_ms(metrics.decode_time_ms),
        ttft_ms=rounded_ms(metrics.ttft_ms),
        processing_time_ms=rounded_ms(metrics.processing_time_ms),
        total_time_ms=rounded_ms(metrics.total_time_ms),
    )


def rounded_ms(duration_ms: float) -> float:
    """Rounded to microseconds, because further digits are noise of the clock."""
    return round(duration_ms, 3)


def rounded_s(duration_s: float) -> float:
    """Rounded to microseconds."""
    return round(duration_s, 6)


def seen_images(
    result: EngineResult, image_ids: Sequence[str]
) -> list[vision_service_pb2.SeenImage]:
    """The images of a request with several images. ``image_ids``: of the stored images, or ""."""
    return [
        vision_service_pb2.SeenImage(image_size=_image_size(image.size), image_id=image_id)
        for image, image_id in zip(result.images, image_ids, strict=True)
    ]


def _image_size(size: tuple[int, int]) -> common_pb2.ImageSize:
    return common_pb2.ImageSize(width=size[0], height=size[1])


def shared_fields(result: EngineResult, image_positions: int) -> dict[str, Any]:
    """The fields that every response has, except image_id, which comes from the image store."""
    size = result.image_size
    metrics = result.metrics
    return {
        "finish_reason": _FINISH_REASONS[result.finish_reason],
        "usage": usage_message(metrics, image_positions * len(result.images) * result.num_looks),
        "timings": timings_message(metrics),
        "model": result.model,
        "request_id": result.request_id,
        "image_size": None if size is None else _image_size(size),
        "seed": result.seed,
    }


def _clip(value: float) -> float:
    return min(1.0, max(0.0, value))
