"""Messages of kestrel.v1 as values for JSON, in the form that Moondream's own interfaces have.

The HTTP and KServe adapters share them. Coordinates are numbers in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

Found = pb.PointResponse | pb.DetectResponse
Response = pb.QueryResponse | pb.CaptionResponse | Found | pb.SegmentResponse | pb.GazeResponse
CAPTION_LENGTHS = {
    "short": pb.CAPTION_LENGTH_SHORT,
    "normal": pb.CAPTION_LENGTH_NORMAL,
    "long": pb.CAPTION_LENGTH_LONG,
}
REFINEMENTS = {True: pb.REFINEMENT_REQUIRED, False: pb.REFINEMENT_NONE}


def skill_values(response: Response) -> dict[str, Any]:
    """The output of a skill: of the only answer, or of the only name."""
    if isinstance(response, pb.QueryResponse):
        (answer,) = response.answers
        values: dict[str, Any] = {"answer": answer.text}
        if answer.HasField("reasoning"):
            values["reasoning"] = _reasoning_values(answer.reasoning)
        return values | _abstention_values(response)
    if isinstance(response, pb.CaptionResponse):
        (caption,) = response.captions
        return {"caption": caption.text}
    if isinstance(response, pb.SegmentResponse):
        return _outline_values(response)
    if isinstance(response, pb.GazeResponse):
        return _gaze_values(response)
    (search,), (places,) = response.searches, places_by_name(response)
    return found_values(response, search, places)


def found_values(
    response: Found, search: pb.ObjectSearch, places: list[dict[str, float]]
) -> dict[str, Any]:
    """The places of one name, and the probability that the image has no such object, if it is known."""
    key = "objects" if isinstance(response, pb.DetectResponse) else "points"
    return {key: places, **({"absence": search.absence} if search.HasField("absence") else {})}


def place_values(found: pb.Detection) -> dict[str, float]:
    """The box of an object, or its centre, with its score."""
    if found.HasField("box"):
        return _box_values(found.box, found.score)
    return {"x": found.point.x, "y": found.point.y, "score": found.score}


def _box_values(box: common_pb2.Box, score: float) -> dict[str, float]:
    edges = {"x_min": box.x_min, "y_min": box.y_min, "x_max": box.x_max, "y_max": box.y_max}
    return {**edges, "score": score}


def places_by_name(response: Found) -> list[list[dict[str, float]]]:
    """The places of the objects of each name, in the order of the task."""
    found: dict[str, list[dict[str, float]]] = {each.object: [] for each in response.searches}
    for each in response.detections:
        found[each.label].append(place_values(each))
    return list(found.values())


def _abstention_values(response: pb.QueryResponse) -> dict[str, Any]:
    """Empty if the question presupposed no object."""
    if not response.presupposed:
        return {}
    absences = [{"object": each.object, "absence": each.absence} for each in response.presupposed]
    return {"absences": absences, "abstained": response.abstained}


def _reasoning_values(reasoning: pb.Reasoning) -> dict[str, Any]:
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


def _outline_values(response: pb.SegmentResponse) -> dict[str, Any]:
    """``response``: of one name."""
    (search,) = response.searches
    if not response.detections:
        omitted = {"score": search.omitted_score} if search.HasField("omitted_score") else {}
        return {"path": "", **omitted}
    (found,) = response.detections
    outline = found.outline
    values: dict[str, Any] = {"path": outline.svg_path}
    if found.HasField("box"):
        values |= {"bbox": place_values(found), "score": found.score}
    if outline.HasField("parse_error"):
        values["parse_error"] = outline.parse_error
    if outline.HasField("coarse"):
        values["coarse_path"] = outline.coarse.svg_path
        values["coarse_bbox"] = _box_values(outline.coarse.box, found.score)
    return values


def _gaze_values(response: pb.GazeResponse) -> dict[str, Any]:
    """The only gaze, as Moondream's own code returns it; of faces that the model found, a list of gazes."""
    gazes = []
    for each in response.gazes:
        target = {"x": each.target.x, "y": each.target.y, "score": each.score}
        gaze: dict[str, Any] = {"gaze": target if each.HasField("target") else None}
        if each.HasField("absence"):
            gaze["absence"] = each.absence
        if response.HasField("search"):
            edges = ("x_min", "y_min", "x_max", "y_max")
            gaze["face"] = {edge: getattr(each.face, edge) for edge in edges}
            gaze["eye"] = {"x": each.eye.x, "y": each.eye.y}
        gazes.append(gaze)
    if not response.HasField("search"):
        return gazes[0]
    found: dict[str, Any] = {"gazes": gazes, "count": len(gazes)}
    if response.search.HasField("absence"):
        found["face_absence"] = response.search.absence
    return found


def finish_reason(response: Response) -> str:
    """ "stop" or "length": of the first answer, or of all names together."""
    parts: Sequence[pb.Answer] | Sequence[pb.ObjectSearch] | Sequence[pb.Gaze]
    if isinstance(response, pb.QueryResponse):
        parts = response.answers[:1]
    elif isinstance(response, pb.CaptionResponse):
        parts = response.captions[:1]
    elif isinstance(response, pb.GazeResponse):
        parts = response.gazes
    else:
        parts = response.searches
    is_cut = any(each.finish_reason == common_pb2.FINISH_REASON_LENGTH for each in parts)
    return "length" if is_cut else "stop"


def call_values(response: Response) -> dict[str, Any]:
    """What the outputs of all skills have beside them."""
    return {
        "request_id": response.info.request_id,
        "finish_reason": finish_reason(response),
        "metrics": _metrics_values(response),
    }


def num_crops(info: common_pb2.RequestInfo) -> int:
    """The crops that the model saw of all images."""
    return sum(image.num_crops for image in info.images)


def _metrics_values(response: Response) -> dict[str, float]:
    timings = response.timings
    return {
        "num_crops": num_crops(response.info),
        "input_tokens": response.usage.input_tokens,
        "output_tokens": response.usage.output_tokens,
        "prefill_time_ms": timings.prefill_ms,
        "decode_time_ms": timings.decode_ms,
        "ttft_ms": timings.ttft_ms,
    }


def spatial_ref(values: Sequence[float], field: FieldPath) -> common_pb2.SpatialRef:
    """A point from [x, y], or a box from [x_min, y_min, x_max, y_max]. Raises InvalidRequest."""
    if len(values) == 2:
        return common_pb2.SpatialRef(point=common_pb2.Point(x=values[0], y=values[1]))
    if len(values) == 4:
        x_min, y_min, x_max, y_max = values
        box = common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
        return common_pb2.SpatialRef(box=box)
    raise InvalidRequest(field, f"must have 2 or 4 numbers, got {len(values)}")
