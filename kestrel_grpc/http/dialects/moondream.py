"""Moondream's REST interface: /v1/query, /v1/caption, /v1/point, /v1/detect and /v1/segment.

The forms are those that the ``moondream`` package sends and reads: an image as a data URL or plain base64, settings in
an object of their own, coordinates in [0, 1], a stream as server-sent events that end with ``"completed": true``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest

from ...service_names import VISION_METHODS
from ...services.messages.json_values import (
    CAPTION_LENGTHS,
    absence_values,
    abstention_values,
    box_values,
    finish_reason,
    metrics_values,
    outline_values,
    point_values,
    reasoning_values,
    spatial_ref,
)
from ...services.vision import VisionService
from ..edge import Asked, Endpoint
from ..fields import Fields, image_bytes, numbers, positive
from .known_fields import MOONDREAM, MOONDREAM_SAMPLING, MOONDREAM_SETTINGS, MOONDREAM_TILES
from .models import set_model

_NAMES = {
    "image": "image_url",
    "image.encoded": "image_url",
    "abstention.max_absence": "settings.max_absence",
    "max_objects": "settings.max_objects",
    "min_score": "settings.min_score",
    "max_overlap": "settings.max_overlap",
    "image.region": "settings.region",
    "options.model": "model",
}


def endpoints(
    service: VisionService, served: Callable[[], Sequence[str]]
) -> dict[tuple[str, str], Endpoint]:
    """Returns the endpoints by verb and path. ``served`` returns the served models' names, the default
    first."""

    def query(fields: Fields) -> Asked:
        request = pb.QueryRequest(
            question=fields.text("question"),
            reasoning=fields.flag("reasoning"),
            spatial_refs=_spatial_refs(fields),
            system=fields.text("system", ""),
        )
        _fill_abstention(request, fields)
        _fill(request, fields, served(), needs_image=False)
        if not fields.flag("stream"):
            return Asked(request, service.Query, query_json)
        return Asked(request, service.StreamQuery, query_json, _text_events(query_json))

    def caption(fields: Fields) -> Asked:
        length = fields.text("length", "normal")
        if length not in CAPTION_LENGTHS:
            raise InvalidRequest("length", f"must be short, normal or long, got {length!r}")
        request = pb.CaptionRequest(length=CAPTION_LENGTHS[length])
        _fill(request, fields, served())
        if not fields.flag("stream"):
            return Asked(request, service.Caption, caption_json)
        return Asked(request, service.StreamCaption, caption_json, _text_events(caption_json))

    def point(fields: Fields) -> Asked:
        refs, names = _spatial_refs(fields), _objects(fields)
        request = pb.PointRequest(spatial_refs=refs, **names)
        _fill(request, fields, served())
        return Asked(request, service.Point, _several(names, point_json))

    def detect(fields: Fields) -> Asked:
        names = _objects(fields)
        request = pb.DetectRequest(**names)
        _fill(request, fields, served())
        return Asked(request, service.Detect, _several(names, detect_json))

    def segment(fields: Fields) -> Asked:
        refs = _spatial_refs(fields)
        request = pb.SegmentRequest(object=fields.text("object"), spatial_refs=refs)
        if fields.values.get("refine") is not None:
            request.refine = fields.flag("refine")
        _fill(request, fields, served())
        if not fields.flag("stream"):
            return Asked(request, service.Segment, segment_json)
        return Asked(request, service.StreamSegment, segment_json, _segment_events)

    skills = {
        "query": query,
        "caption": caption,
        "point": point,
        "detect": detect,
        "segment": segment,
    }
    return {("POST", f"/v1/{skill}"): _endpoint(skill, read) for skill, read in skills.items()}


def _endpoint(skill: str, read: Callable[[Fields], Asked]) -> Endpoint:
    def checked(fields: Fields) -> Asked:
        MOONDREAM[skill].check(fields)
        adapter = next((name for name, _ in _adapters(fields)), "model")
        return replace(
            read(fields),
            rename=lambda path: adapter if path.endswith("options.adapter") else json_name(path),
        )

    method = f"{VISION_METHODS}{skill.title()}"
    return Endpoint(method, checked, caps_max_tokens=True)


def json_name(path: str) -> str:
    """Returns the field of Moondream's JSON for a field of kestrel.v1."""
    if path.startswith("sampling."):
        return f"settings.{path.removeprefix('sampling.')}"
    if path.partition(".")[0] == "tiles":
        return f"settings.{path}"
    if path.startswith("abstention.objects"):
        return path.replace("abstention.objects", "presupposes")
    return _NAMES.get(path, path)


def _fill(request: Any, fields: Fields, names: Sequence[str], *, needs_image: bool = True) -> None:
    """Image, settings and model, which all skills' requests share. Raises InvalidRequest, ModelNotFoundError."""
    if needs_image or fields.values.get("image_url") is not None:
        request.image.encoded = image_bytes(fields.text("image_url"), "image_url")
    settings = fields.inner("settings")
    MOONDREAM_SETTINGS.check(settings)
    MOONDREAM_SAMPLING.fill(request.sampling, settings)
    max_objects = positive(settings, "max_objects")
    if max_objects is not None and "max_objects" in request.DESCRIPTOR.fields_by_name:
        request.max_objects = max_objects
    min_score = settings.number("min_score")
    if min_score is not None and "min_score" in request.DESCRIPTOR.fields_by_name:
        request.min_score = min_score
    max_overlap = settings.number("max_overlap")
    if max_overlap is not None and "max_overlap" in request.DESCRIPTOR.fields_by_name:
        request.max_overlap = max_overlap
    _fill_looks(request, settings, fields)
    model = fields.values.get("model")
    if model is not None:
        set_model(request.options, fields.text("model"), names)
    for name, adapter in _adapters(fields):
        named = request.options.adapter
        if named and named != adapter:
            raise InvalidRequest(name, f"is {adapter!r}, beside {named!r}; name only one adapter")
        request.options.adapter = adapter


def _adapters(fields: Fields) -> Iterator[tuple[str, str]]:
    """The adapters that fields other than ``model`` name, each with the field's name. Raises InvalidRequest."""
    for given in (fields, fields.inner("settings")):
        for key in ("adapter", "variant"):
            if given.values.get(key) is not None:
                yield given.name(key), given.text(key)


def _fill_abstention(request: pb.QueryRequest, fields: Fields) -> None:
    """Raises InvalidRequest."""
    most = fields.inner("settings").number("max_absence")
    objects = fields.texts("presupposes")
    if objects:
        request.abstention.objects.extend(objects)
        if most is not None:
            request.abstention.max_absence = most


def _fill_looks(request: Any, settings: Fields, fields: Fields) -> None:
    """The region of the image, as [x_min, y_min, x_max, y_max], and for point and detect its tiles, as an object.
    Raises InvalidRequest."""
    edges = settings.items("region")
    if edges:
        if not request.HasField("image"):
            raise InvalidRequest(settings.name("region"), f"needs {fields.name('image_url')}")
        read = numbers(edges, settings.name("region"))
        if len(read) != 4:
            raise InvalidRequest(settings.name("region"), f"must have 4 numbers, got {len(read)}")
        region = request.image.region
        region.x_min, region.y_min, region.x_max, region.y_max = read
    tiles = settings.inner("tiles")
    if not tiles.values or "tiles" not in request.DESCRIPTOR.fields_by_name:
        return
    MOONDREAM_TILES.check(tiles)
    for key in ("rows", "columns"):
        setattr(request.tiles, key, positive(tiles, key) or 1)
    overlap = tiles.number("overlap")
    if overlap is not None:
        request.tiles.overlap = overlap
    if tiles.values.get("whole_image") is not None:
        request.tiles.whole_image = tiles.flag("whole_image")


def _spatial_refs(fields: Fields) -> list[common_pb2.SpatialRef]:
    """Points as [x, y], boxes as [x_min, y_min, x_max, y_max]. Raises InvalidRequest."""
    refs = []
    for index, item in enumerate(fields.items("spatial_refs")):
        name = fields.name(f"spatial_refs[{index}]")
        refs.append(spatial_ref(numbers(item, name), name))
    return refs


def _objects(fields: Fields) -> dict[str, Any]:
    """The field ``object``, or ``objects`` with several names. Raises InvalidRequest."""
    names = fields.items("objects")
    if not names:
        return {"object": fields.text("object")}
    if fields.values.get("object") is not None:
        raise InvalidRequest("objects", "is set beside object; set only one of them")
    return {"objects": fields.texts("objects")}


def _several(names: dict[str, Any], one: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """``one``, or for several names a function that converts a response with the results of all, in their order."""
    if "objects" not in names:
        return one

    def all_json(response: Any) -> dict[str, Any]:
        results = []
        for name, result in zip(names["objects"], response.results, strict=True):
            outcome = result.WhichOneof("outcome")
            if outcome == "error":
                error = {"message": result.error.message, "code": result.error.reason.lower()}
                results.append({"object": name, "error": error})
            else:
                found = one(getattr(result, outcome))
                places = ("points", "objects", "count", "absence")
                results.append({"object": name, **{k: v for k, v in found.items() if k in places}})
        return {"results": results, **_shared(response)}

    return all_json


def query_json(response: pb.QueryResponse) -> dict[str, Any]:
    body: dict[str, Any] = {"answer": response.answer, **_shared(response)}
    if response.HasField("reasoning"):
        body["reasoning"] = reasoning_values(response.reasoning)
    return body | abstention_values(response)


def caption_json(response: pb.CaptionResponse) -> dict[str, Any]:
    return {"caption": response.caption, **_shared(response)}


def point_json(response: pb.PointResponse) -> dict[str, Any]:
    points = [point_values(point) for point in response.points]
    return {
        "points": points,
        "count": len(points),
        **absence_values(response),
        **_shared(response),
    }


def detect_json(response: pb.DetectResponse) -> dict[str, Any]:
    objects = [box_values(box) for box in response.objects]
    return {"objects": objects, **absence_values(response), **_shared(response)}


def segment_json(response: pb.SegmentResponse) -> dict[str, Any]:
    return {**outline_values(response), **_shared(response)}


def _shared(response: Any) -> dict[str, Any]:
    return {
        "request_id": response.request_id,
        "model": response.model,
        "finish_reason": finish_reason(response),
        "metrics": metrics_values(response),
    }


def _text_events(final: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Iterable[bytes]]:
    """The events of an answer or a caption."""

    def events(message: Any) -> Iterable[bytes]:
        kind = message.WhichOneof("event")
        if kind == "text_delta":
            delta = message.text_delta
            yield _event(chunk=delta.text, completed=False, token_index=delta.output_tokens)
        elif kind == "reasoning_delta":
            delta = message.reasoning_delta
            yield _event(
                reasoning_chunk=delta.text, completed=False, token_index=delta.output_tokens
            )
        elif kind == "final":
            yield _event(chunk="", completed=True, **final(message.final))

    return events


def _segment_events(message: Any) -> Iterable[bytes]:
    kind = message.WhichOneof("event")
    if kind == "object":
        yield _event(type="bbox", bbox=box_values(message.object), completed=False)
    elif kind == "path_piece":
        # The client concatenates the pieces without changes.
        yield _event(type="path_delta", chunk=f"{message.path_piece.path} ", completed=False)
    elif kind == "final":
        yield _event(type="final", completed=True, **segment_json(message.final))


def _event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
