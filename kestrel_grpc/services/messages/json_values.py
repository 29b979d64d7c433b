"""Messages of kestrel.v1 as values for JSON, in the form that Moondream's own interfaces have.

The HTTP and KServe adapters share them. Coordinates are numbers in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest

CAPTION_LENGTHS = {
    "short": pb.CAPTION_LENGTH_SHORT,
    "normal": pb.CAPTION_LENGTH_NORMAL,
    "long": pb.CAPTION_LENGTH_LONG,
}


def point_values(point: common_pb2.Point) -> dict[str, float]:
    return {"x": point.x, "y": point.y, **score_values(point)}


def box_values(box: common_pb2.Box) -> dict[str, float]:
    edges = {"x_min": box.x_min, "y_min": box.y_min, "x_max": box.x_max, "y_max": box.y_max}
    return {**edges, **score_values(box)}


def score_values(found: common_pb2.Point | common_pb2.Box) -> dict[str, float]:
    """Empty if there is no score."""
    return {"score": found.score} if found.HasField("score") else {}


def absence_values(response: pb.PointResponse | pb.DetectResponse) -> dict[str, float]:
    """The probability that the image has no such object. Empty if it is unknown."""
    return {"absence": response.absence} if response.HasField("absence") else {}


def abstention_values(response: pb.QueryResponse) -> dict[str, Any]:
    """Empty if the question presupposed no object."""
    if not response.absences:
        return {}
    absences = [{"object": each.object, "absence": each.absence} for each in response.absences]
    return {"absences": absences, "abstained": response.abstained}


def reasoning_values(reasoning: pb.Reasoning) -> dict[str, Any]:
    return {
        "text": reasoning.text,
        "grounding": [
            {
                "start_idx": span.start,
                "end_idx": span.end,
                "points": [[point.x, point.y] for point in span.points],
            }
            for span in reasoning.grounding
        ],
    }


def outline_values(response: pb.SegmentResponse) -> dict[str, Any]:
    values: dict[str, Any] = {"path": response.svg_path}
    if response.HasField("box"):
        values["bbox"] = box_values(response.box)
    if response.HasField("score"):
        values["score"] = response.score
    if response.HasField("parse_error"):
        values["parse_error"] = response.parse_error
    if response.HasField("coarse_path"):
        values["coarse_path"] = response.coarse_path
        values["coarse_bbox"] = box_values(response.coarse_box)
    return values


def finish_reason(response: Any) -> str:
    """ "stop" or "length". ``response``: of any skill, as for ``metrics_values``."""
    return "length" if response.finish_reason == common_pb2.FINISH_REASON_LENGTH else "stop"


def metrics_values(response: Any) -> dict[str, float]:
    timings = response.timings
    return {
        "input_tokens": response.usage.input_tokens,
        "output_tokens": response.usage.output_tokens,
        "prefill_time_ms": timings.prefill_time_ms,
        "decode_time_ms": timings.decode_time_ms,
        "ttft_ms": timings.ttft_ms,
    }


def spatial_ref(values: Sequence[float], field: str) -> common_pb2.SpatialRef:
    """A point from [x, y], or a box from [x_min, y_min, x_max, y_max]. Raises InvalidRequest."""
    if len(values) == 2:
        return common_pb2.SpatialRef(point=common_pb2.Point(x=values[0], y=values[1]))
    if len(values) == 4:
        x_min, y_min, x_max, y_max = values
        box = common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
        return common_pb2.SpatialRef(box=box)
    raise InvalidRequest(field, f"must have 2 or 4 numbers, got {len(values)}")
