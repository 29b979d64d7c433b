"""Moondream's REST interface: /v1/query, /v1/caption, /v1/point, /v1/detect, /v1/segment and /v1/gaze.

The forms are those that the ``moondream`` package sends and reads: an image as a data URL or plain base64, settings in
an object of their own, coordinates in [0, 1], a stream as server-sent events that end with ``"completed": true``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

from ...service_names import VISION_METHODS
from ...services.messages.json_values import (
    CAPTION_LENGTHS,
    REFINEMENTS,
    Found,
    Response,
    call_values,
    found_values,
    place_values,
    places_by_name,
    skill_values,
    spatial_ref,
)
from ...services.messages.task_fields import REQUESTS, fault_of, holder, short_path
from ...services.messages.tasks import EDGES, MAX_GAZES
from ..edge import Endpoint, Endpoints, ServiceCall
from ..fields import Fields, numbers, positive
from ..forms import sent_event
from ..refusals import renamed
from ..services import HttpServices
from .known_fields import (
    MOONDREAM,
    MOONDREAM_FACE,
    MOONDREAM_SAMPLING,
    MOONDREAM_SETTINGS,
    MOONDREAM_TILES,
)
from .models import set_model

_NAMES: dict[FieldPath, FieldPath] = {
    **{(name,): ("settings", name) for name in MOONDREAM_SETTINGS.honoured},
    **{
        (*image, *part): field
        for image in (("image",), ("images", 0))
        for part, field in (
            ((), ("image_url",)),
            (("encoded",), ("image_url",)),
            (("region",), ("settings", "region")),
            (("max_crops",), ("settings", "max_crops")),
        )
    },
    ("abstention", "objects"): ("presupposes",),
    ("abstention", "max_absence"): ("settings", "max_absence"),
    ("refinement",): ("refine",),
    ("options", "model"): ("model",),
    ("eyes", 0): ("eye",),
    ("faces", 0): ("face",),
    ("faces",): ("face",),
}


def endpoints(services: HttpServices) -> Endpoints:
    return {
        ("POST", f"/v1/{skill}"): Endpoint(
            f"{VISION_METHODS}{skill.title()}",
            partial(_call, services, skill),
            fields=MOONDREAM[skill],
            caps_max_tokens=True,
        )
        for skill in _READERS
    }


def _call(services: HttpServices, skill: str, fields: Fields) -> ServiceCall:
    MOONDREAM[skill].check(fields)
    request = REQUESTS[skill]()
    task = getattr(request, skill)
    _READERS[skill](task, fields)
    image = None
    if skill != "query" or fields.values.get("image_url") is not None:
        image = request.images.add() if skill == "query" else request.image
        image.encoded = fields.image(fields.text("image_url"), "image_url")
    _fill(task, image, request.options, fields, services.names)
    events = _EVENTS.get(skill)
    if events is not None and not fields.flag("stream"):
        events = None
    behaviour = getattr(services.vision, f"{'' if events is None else 'Stream'}{skill.title()}")
    are_several = bool(fields.values.get("objects"))
    adapter = next((path for path, _ in _adapters(fields)), ("model",))
    renames = {**_NAMES, ("options", "adapter"): adapter}
    if not are_several:
        renames |= {("objects",): ("object",), ("objects", 0): ("object",)}
    return ServiceCall(
        *(request, behaviour, _several_json if are_several else _one_json, events),
        rename=lambda path: renamed(short_path(path), renames),
    )


def _query(task: pb.QueryTask, fields: Fields) -> None:
    task.question = fields.text("question")
    task.reasoning = fields.flag("reasoning")
    task.spatial_refs.extend(_spatial_refs(fields))
    task.system = fields.text("system", "")
    most = fields.inner("settings").number("max_absence")
    objects = fields.texts("presupposes")
    if objects:
        task.abstention.objects.extend(objects)
        if most is not None:
            task.abstention.max_absence = most


def _caption(task: pb.CaptionTask, fields: Fields) -> None:
    length = fields.text("length", "normal")
    if length not in CAPTION_LENGTHS:
        raise InvalidRequest("length", f"must be short, normal or long, got {length!r}")
    task.length = CAPTION_LENGTHS[length]


def _point(task: pb.PointTask, fields: Fields) -> None:
    task.spatial_refs.extend(_spatial_refs(fields))
    task.objects.extend(_objects(fields))


def _detect(task: pb.DetectTask, fields: Fields) -> None:
    task.objects.extend(_objects(fields))


def _segment(task: pb.SegmentTask, fields: Fields) -> None:
    task.spatial_refs.extend(_spatial_refs(fields))
    task.objects.append(fields.text("object"))
    if fields.values.get("refine") is not None:
        task.refinement = REFINEMENTS[fields.flag("refine")]


def _gaze(task: pb.GazeTask, fields: Fields) -> None:
    eye, face = fields.items("eye"), fields.values.get("face")
    if eye:
        read = numbers(eye, fields.at("eye"))
        if len(read) != 2:
            raise InvalidRequest("eye", f"must have 2 numbers, got {len(read)}")
        task.eyes.add(x=read[0], y=read[1])
    if isinstance(face, dict):
        given = MOONDREAM_FACE.inner(fields, "face")
        edges = {edge: given.number(edge) for edge in EDGES}
        for edge, value in edges.items():
            if value is None:
                raise InvalidRequest(given.at(edge), "is required")
        task.faces.add(**edges)
    elif face is not None:
        raise InvalidRequest("face", "must be an object with x_min, y_min, x_max and y_max")
    task.accurate = fields.flag("accurate")
    if (most := fields.whole("max_faces")) is not None:
        if not 1 <= most <= MAX_GAZES:
            raise InvalidRequest("max_faces", f"must be in [1, {MAX_GAZES}], got {most}")
        task.max_faces = most


_READERS: dict[str, Callable[[Any, Fields], None]] = {
    "query": _query,
    "caption": _caption,
    "point": _point,
    "detect": _detect,
    "segment": _segment,
    "gaze": _gaze,
}


def _fill(
    task: Any,
    image: common_pb2.Image | None,
    options: common_pb2.RequestOptions,
    fields: Fields,
    names: Sequence[str],
) -> None:
    """Settings and model, which all skills' requests share. Raises InvalidRequest, ModelNotFoundError."""
    settings = MOONDREAM_SETTINGS.inner(fields, "settings")
    MOONDREAM_SAMPLING.fill(task, settings)
    for key, name in (("tiles", "tiles"), ("max_absence", "abstention")):
        if settings.values.get(key) and name not in task.DESCRIPTOR.fields_by_name:
            raise InvalidRequest(settings.at(key), "is not a setting of this skill")
    for key, value in (
        ("max_objects", positive(settings, "max_objects")),
        ("min_score", settings.number("min_score")),
        ("max_overlap", settings.number("max_overlap")),
    ):
        if value is not None:
            setattr(holder(task, key, settings.at(key)), key, value)
    _fill_image(image, settings)
    _fill_tiles(task, settings)
    model = fields.values.get("model")
    if model is not None:
        set_model(options, fields.text("model"), names)
    for path, adapter in _adapters(fields):
        named = options.adapter
        if named and named != adapter:
            raise InvalidRequest(path, f"is {adapter!r}, beside {named!r}; name only one adapter")
        options.adapter = adapter


def _adapters(fields: Fields) -> Iterator[tuple[FieldPath, str]]:
    """The adapters that fields other than ``model`` name, each with the field's path. Raises InvalidRequest."""
    for given in (fields, fields.inner("settings")):
        for key in ("adapter", "variant"):
            if given.values.get(key) is not None:
                yield given.at(key), given.text(key)


def _fill_image(image: common_pb2.Image | None, settings: Fields) -> None:
    """The region of the image, as [x_min, y_min, x_max, y_max], and its budget. Raises InvalidRequest."""
    edges, budget = settings.items("region"), positive(settings, "max_crops")
    for key, value in (("region", edges), ("max_crops", budget)):
        if value and image is None:
            raise InvalidRequest(settings.at(key), "needs image_url")
    if image is None:
        return
    if edges:
        read = numbers(edges, settings.at("region"))
        if len(read) != 4:
            raise InvalidRequest(settings.at("region"), f"must have 4 numbers, got {len(read)}")
        region = image.region
        region.x_min, region.y_min, region.x_max, region.y_max = read
    if budget is not None:
        image.max_crops = budget


def _fill_tiles(task: Any, settings: Fields) -> None:
    """The tiles of point and detect, as an object. Raises InvalidRequest."""
    tiles = settings.inner("tiles")
    if not tiles.values:
        return
    MOONDREAM_TILES.check(tiles)
    for key in ("rows", "columns"):
        setattr(task.tiles, key, positive(tiles, key) or 1)
    overlap = tiles.number("overlap")
    if overlap is not None:
        task.tiles.overlap = overlap
    if tiles.values.get("whole_image") is not None:
        task.tiles.tiles_only = not tiles.flag("whole_image")


def _spatial_refs(fields: Fields) -> list[common_pb2.SpatialRef]:
    """Points as [x, y], boxes as [x_min, y_min, x_max, y_max]. Raises InvalidRequest."""
    refs = []
    for index, item in enumerate(fields.items("spatial_refs")):
        path = fields.at("spatial_refs", index)
        refs.append(spatial_ref(numbers(item, path), path))
    return refs


def _objects(fields: Fields) -> Sequence[str]:
    """The names of the objects. Raises InvalidRequest."""
    if not fields.items("objects"):
        return [fields.text("object")]
    if fields.values.get("object") is not None:
        raise InvalidRequest("objects", "is set beside object; set only one of them")
    return fields.texts("objects")


def _several_json(response: Found) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for search, places in zip(response.searches, places_by_name(response), strict=True):
        if search.HasField("error"):
            fault = fault_of(search.error)
            outcome: Any = {"error": {"message": fault.message, "code": fault.reason.lower()}}
        else:
            outcome = _counted(found_values(response, search, places))
        results.append({"object": search.object, **outcome})
    return {"results": results, **_shared(response)}


def _one_json(response: Response) -> dict[str, Any]:
    return {**_counted(skill_values(response)), **_shared(response)}


def _counted(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"count": len(values["points"])} if "points" in values else values


def _shared(response: Response) -> dict[str, Any]:
    return {"model": response.info.model, **call_values(response)}


def _text_events(message: Any) -> Iterable[bytes]:
    """The events of an answer or a caption."""
    kind = message.WhichOneof("event")
    if kind == "text_delta":
        delta = message.text_delta
        yield _event(chunk=delta.text, completed=False, token_index=delta.output_tokens)
    elif kind == "reasoning_delta":
        delta = message.reasoning_delta
        yield _event(reasoning_chunk=delta.text, completed=False, token_index=delta.output_tokens)
    elif kind == "final":
        yield _event(chunk="", completed=True, **_one_json(message.final))


def _segment_events(message: Any) -> Iterable[bytes]:
    kind = message.WhichOneof("event")
    if kind == "detection":
        yield _event(type="bbox", bbox=place_values(message.detection), completed=False)
    elif kind == "path_piece":
        # The client concatenates the pieces without changes.
        yield _event(type="path_delta", chunk=f"{message.path_piece.path} ", completed=False)
    elif kind == "final":
        yield _event(type="final", completed=True, **_one_json(message.final))


def _event(**fields: Any) -> bytes:
    return sent_event(fields)


_EVENTS: dict[str, Callable[[Any], Iterable[bytes]]] = {
    "query": _text_events,
    "caption": _text_events,
    "segment": _segment_events,
}
"""Of the skills that stream."""
