"""From the engine's results and updates to messages: pure functions. Coordinates are clipped to the image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineMetrics, EngineResult, StreamUpdate, TokenLogprob

FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


class NameResult(NamedTuple):
    """What the search for one name gave."""

    detections: list[pb.Detection]
    search: pb.ObjectSearch


def query_answer(result: EngineResult) -> pb.Answer:
    return _answer(result, result.output["answer"], result.output.get("reasoning"))


def caption_answer(result: EngineResult) -> pb.Answer:
    return _answer(result, result.output["caption"])


def found_places(result: EngineResult, label: str) -> NameResult:
    """Points or boxes."""
    output = result.output
    places = output["points"] if "points" in output else output["objects"]
    return NameResult([detection(found, label) for found in places], _search(result, label))


def found_outline(result: EngineResult, label: str) -> NameResult:
    """The outline without its mask, which takes time to draw: see masks.py."""
    segment, search = result.output["segments"][0], _search(result, label)
    box, error = segment.get("bbox"), segment.get("parse_error")
    if box is None and error is None and not segment["svg_path"]:
        # The model wrote no outline, or one whose score is too low.
        search.omitted_score = segment.get("score", 0.0)
        return NameResult([], search)
    found = detection({**(box or {}), "score": segment.get("score", 0.0)}, label)
    found.outline.svg_path = segment["svg_path"]
    if error is not None:
        found.outline.parse_error = error
    if segment.get("refined"):
        coarse = found.outline.coarse
        coarse.svg_path = segment["coarse_path"]
        set_box(coarse.box, segment["coarse_bbox"])
    return NameResult([found], search)


def event_fields(update: StreamUpdate, label: str) -> dict[str, Any]:
    """The one field of a stream event that holds the update, by name. ``label``: name of the object that the request is
    about."""
    tokens = update.token_index
    if update.text or update.tokens:
        delta = pb.TextDelta(text=update.text, output_tokens=tokens)
        if update.tokens:
            delta.tokens.extend(map(token_logprob, update.tokens))
        return {"text_delta": delta}
    if update.reasoning:
        thought = pb.ReasoningDelta(text=update.reasoning, output_tokens=tokens)
        return {"reasoning_delta": thought}
    if update.path:
        return {"path_piece": pb.PathPiece(path=update.path, output_tokens=tokens, label=label)}
    assert update.object is not None, "an update without a payload"
    return {"detection": detection(update.object, label)}


def detection(found: Mapping[str, float], label: str) -> pb.Detection:
    """The point, or the part of the box that lies in the image; never empty, because the box's centre lies there."""
    message = pb.Detection(label=label, score=found.get("score", 0.0))
    if "x" in found:
        message.point.x, message.point.y = _clip(found["x"]), _clip(found["y"])
    elif "x_min" in found:
        set_box(message.box, found)
    return message


def _answer(
    result: EngineResult, text: str, reasoning: Mapping[str, Any] | None = None
) -> pb.Answer:
    answer = pb.Answer(
        text=text,
        logprobs=logprobs_message(result),
        finish_reason=FINISH_REASONS[result.finish_reason],
        seed=result.seed,
    )
    if reasoning is not None:
        answer.reasoning.text = reasoning["text"]
        # A reasoning that did not end was ended with the request.
        answer.reasoning.finish_reason = FINISH_REASONS[
            reasoning["finish_reason"] or result.finish_reason
        ]
        for span in reasoning["grounding"]:
            # The message counts code points, as Python's indices into str do.
            points = [common_pb2.Point(x=_clip(x), y=_clip(y)) for x, y in span["points"]]
            answer.reasoning.grounding.add(
                start=span["start_idx"], end=span["end_idx"], points=points
            )
    return answer


def _search(result: EngineResult, label: str) -> pb.ObjectSearch:
    return pb.ObjectSearch(
        object=label, absence=result.absence, finish_reason=FINISH_REASONS[result.finish_reason]
    )


def set_box(box: common_pb2.Box, found: Mapping[str, float]) -> None:
    box.x_min, box.y_min = _clip(found["x_min"]), _clip(found["y_min"])
    box.x_max, box.y_max = _clip(found["x_max"]), _clip(found["y_max"])


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


def set_usage(usage: common_pb2.Usage, metrics: EngineMetrics) -> None:
    usage.input_tokens = metrics.input_tokens
    usage.output_tokens = metrics.output_tokens
    usage.cached_tokens = metrics.cached_tokens
    usage.image_tokens = metrics.image_tokens
    usage.reasoning_tokens = metrics.reasoning_tokens
    usage.device_ms = rounded_ms(metrics.device_time_ms)


def timings_of_several(metrics: EngineMetrics, total_ms: float) -> common_pb2.Timings:
    """Those of a call with several requests. ``metrics``: of all together."""
    return common_pb2.Timings(
        queue_ms=rounded_ms(metrics.queue_time_ms),
        ttft_ms=rounded_ms(metrics.ttft_ms),
        total_ms=rounded_ms(total_ms),
    )


def set_timings(timings: common_pb2.Timings, metrics: EngineMetrics) -> None:
    durations_ms = (
        metrics.queue_time_ms,
        metrics.preprocess_time_ms,
        metrics.prefill_time_ms,
        metrics.decode_time_ms,
        metrics.ttft_ms,
        metrics.processing_time_ms,
        metrics.total_time_ms,
    )
    (
        timings.queue_ms,
        timings.preprocess_ms,
        timings.prefill_ms,
        timings.decode_ms,
        timings.ttft_ms,
        timings.processing_ms,
        timings.total_ms,
    ) = [int(each * 1e3 + 0.5) / 1e3 for each in durations_ms]  # As rounded_ms, in one function.


def rounded_ms(duration_ms: float) -> float:
    """Rounded to microseconds, because further digits are noise of the clock. round() takes six times as long."""
    return int(duration_ms * 1e3 + 0.5) / 1e3


def _clip(value: float) -> float:
    return 0.0 if value < 0.0 else 1.0 if value > 1.0 else value
