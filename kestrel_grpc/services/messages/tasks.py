"""From a task to the requests of the engine that answer it: pure functions without I/O or state.

This module does not check what the engine checks (ranges, texts, images), so that each rule stands in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.message import Message

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, Request, Tiles

from ...edge.messages.fields import in_range, known_value, meant_float
from .json_values import CAPTION_LENGTHS, REFINEMENTS

MAX_NAMES = 256
MAX_SAMPLES = 16
MAX_GAZES = 256
FACE = "face"
"""The name by which faces are found."""
EDGES = ("x_min", "y_min", "x_max", "y_max")

_LENGTHS: dict[Any, str] = {
    pb.CAPTION_LENGTH_UNSPECIFIED: "normal",
    **{number: name for name, number in CAPTION_LENGTHS.items()},
}
_REFINEMENTS: dict[Any, dict[str, bool]] = {
    pb.REFINEMENT_UNSPECIFIED: {},
    **{number: {"refine": refine} for refine, number in REFINEMENTS.items()},
}
_MASKS = {number: number for number in pb.MaskFormat.values()}

TextTask: TypeAlias = pb.QueryTask | pb.CaptionTask
Point: TypeAlias = tuple[float, float]
"""x and y."""
Edges: TypeAlias = tuple[float, float, float, float]
"""As EDGES."""
FindTask: TypeAlias = pb.PointTask | pb.DetectTask | pb.SegmentTask


def label_of(request: Request) -> str:
    """Name of the object that a request is about, as in the task; empty if it is about none."""
    name = request.arguments.get("object", "")
    return name if isinstance(name, str) else ""


def query_requests(task: pb.QueryTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    given = field_values(task)
    arguments: dict[str, Any] = {
        "question": task.question,
        "reasoning": task.reasoning,
        "spatial_refs": read_spatial_refs(given.get("spatial_refs", ())),
    }
    if task.system:
        arguments["system"] = task.system
    if task.answer_start:
        arguments["answer_start"] = task.answer_start
    if "history" in given:
        arguments["history"] = [(turn.question, turn.answer) for turn in task.history]
        arguments |= _image_turns(task, num_images)
    settings = _text_settings(given)
    if "max_reasoning_tokens" in given:
        settings["max_reasoning_tokens"] = given["max_reasoning_tokens"]
    if "abstention" in given:
        if not task.abstention.objects:
            raise InvalidRequest(
                ("abstention", "objects"), "is empty: name the objects of the question"
            )
        arguments["presupposes"] = list(task.abstention.objects)
        if task.abstention.HasField("max_absence"):
            settings["max_absence"] = meant_float(task.abstention.max_absence)
    return _samples("query", task, arguments, settings)


def caption_requests(task: pb.CaptionTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    length = known_value("length", task.length, pb.CaptionLength, _LENGTHS)
    settings = _text_settings(field_values(task))
    return _samples("caption", task, {"length": length}, settings)


def point_requests(task: pb.PointTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    arguments = {"spatial_refs": read_spatial_refs(task.spatial_refs)}
    settings = _settings(field_values(task), "min_score", "max_objects")
    return _names("point", task, arguments, settings)


def detect_requests(task: pb.DetectTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    settings = _settings(field_values(task), "min_score", "max_objects", "max_overlap")
    return _names("detect", task, {}, settings)


def segment_requests(task: pb.SegmentTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    known_value("mask_format", task.mask_format, pb.MaskFormat, _MASKS)
    refined = known_value("refinement", task.refinement, pb.Refinement, _REFINEMENTS)
    arguments = {"spatial_refs": read_spatial_refs(task.spatial_refs), **refined}
    return _names("segment", task, arguments, _settings(field_values(task), "min_score"))


def gaze_requests(task: pb.GazeTask, num_images: int) -> list[Request]:
    """A request for each eye or face; without any, the one that finds faces. Raises InvalidRequest."""
    for field in ("eyes", "faces"):
        if (count := len(getattr(task, field))) > MAX_GAZES:
            raise InvalidRequest(field, f"has {count} places, the limit is {MAX_GAZES}")
    if task.eyes and task.faces:
        raise InvalidRequest("faces", "is set beside an eye; set only one of them")
    if task.eyes and task.accurate:
        raise InvalidRequest(
            "accurate", "looks from places in a face; give the face instead of an eye"
        )
    if task.HasField("max_faces"):
        if task.eyes or task.faces:
            raise InvalidRequest(
                "max_faces", "limits the faces that are found; leave out eyes and faces"
            )
        in_range(task, "max_faces", 1, MAX_GAZES, 1)
    if task.HasField("max_tokens") and task.max_tokens < 1:
        # The request that finds faces does not have it.
        raise InvalidRequest("max_tokens", f"{task.max_tokens} is not a whole number of at least 1")
    faces = [_checked_face(index, edges_of(face)) for index, face in enumerate(task.faces)]
    places = [(eye.x, eye.y) for eye in task.eyes] or list(map(centre_of, faces))
    if places:
        return [gaze_request(task, place) for place in places]
    settings = field_values(task.sampling)
    if task.HasField("max_faces"):
        settings["max_objects"] = task.max_faces
    return [_request("detect", {"object": FACE}, settings)]


def gaze_request(task: pb.GazeTask, eye: Point, **settings: Any) -> Request:
    """``settings``: others than the task's."""
    return _request("gaze", {"eye": eye}, _settings(field_values(task)) | settings)


def edges_of(box: common_pb2.Box) -> Edges:
    return box.x_min, box.y_min, box.x_max, box.y_max


def centre_of(face: Edges) -> Point:
    return (face[0] + face[2]) / 2, (face[1] + face[3]) / 2


def _checked_face(index: int, face: Edges) -> Edges:
    for name, value in zip(EDGES, face, strict=True):
        if not 0 <= value <= 1:
            raise InvalidRequest(("faces", index, name), f"{value!r} is not a number in [0, 1]")
    if face[0] > face[2] or face[1] > face[3]:
        raise InvalidRequest(("faces", index), "needs x_min <= x_max and y_min <= y_max")
    return face


def read_tiles(task: pb.PointTask | pb.DetectTask) -> Tiles | None:
    """Raises InvalidRequest."""
    if not task.HasField("tiles"):
        return None
    tiles = task.tiles
    overlap = {"overlap": meant_float(tiles.overlap)} if tiles.HasField("overlap") else {}
    return Tiles(
        rows=tiles.rows, columns=tiles.columns, whole_image=not tiles.tiles_only, **overlap
    )


def read_spatial_refs(refs: Sequence[common_pb2.SpatialRef]) -> list[tuple[float, ...]]:
    """Points as (x, y), boxes as (x_min, y_min, x_max, y_max); the engine checks their ranges."""
    values: list[tuple[float, ...]] = []
    for index, ref in enumerate(refs):
        kind = ref.WhichOneof("ref")
        if kind == "point":
            values.append((ref.point.x, ref.point.y))
        elif kind == "box":
            values.append((ref.box.x_min, ref.box.y_min, ref.box.x_max, ref.box.y_max))
        else:
            raise InvalidRequest(("spatial_refs", index), "is empty: set point or box")
    return values


def _samples(
    skill: str, task: TextTask, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Request]:
    """A request for each sample; their seeds are drawn later."""
    wanted = task.num_samples if task.HasField("num_samples") else 1
    if not 1 <= wanted <= MAX_SAMPLES:
        raise InvalidRequest("num_samples", f"{wanted} is not in [1, {MAX_SAMPLES}]")
    return [_request(skill, arguments, settings)] * wanted


def _names(
    skill: str, task: FindTask, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Request]:
    """A request for each name."""
    names = task.objects
    if not names:
        raise InvalidRequest("objects", f"is empty; name 1 to {MAX_NAMES} objects")
    if len(names) > MAX_NAMES:
        raise InvalidRequest("objects", f"has {len(names)} names, the limit is {MAX_NAMES}")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest("objects", f"has {name[:40]!r} twice; name each object once")
        seen.add(name)
    return [_request(skill, {"object": name, **arguments}, settings) for name in names]


def _request(skill: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Request:
    """Without an id: the call has it (Run.whole), and to make one takes longer than all else here."""
    return Request(skill=skill, arguments=arguments, settings=settings, request_id="")


def _image_turns(task: pb.QueryTask, num_images: int) -> dict[str, list[int]]:
    """The number of its turn for each image; empty if no turn counts images. Raises InvalidRequest."""
    turns: list[int] = []
    for index, turn in enumerate(task.history):
        count, left = turn.num_images, num_images - len(turns)
        if not 0 <= count <= left:
            raise InvalidRequest(
                ("history", index, "num_images"),
                f"{count} is not in [0, {left}]: the request has {num_images} images, the turns before {len(turns)}",
            )
        turns += [index] * count
    if not any(turn.HasField("num_images") for turn in task.history):
        return {}
    return {"image_turns": turns + [len(task.history)] * (num_images - len(turns))}


def _settings(given: Mapping[str, Any], *own: str) -> dict[str, Any]:
    """The sampling, and those of ``max_tokens`` and the task's fields ``own`` that are set. ``given``: all fields of
    the task that are set."""
    values = {name: given[name] for name in ("max_tokens", *own) if name in given}
    return field_values(given["sampling"]) | values if "sampling" in given else values


def _text_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = _settings(given)
    return settings | text_settings(given["text"]) if "text" in given else settings


def field_values(message: Message) -> dict[str, Any]:
    """The values of the fields that are set, by name."""
    return {descriptor.name: value for descriptor, value in message.ListFields()}


def text_settings(text: common_pb2.TextOptions) -> dict[str, Any]:
    """As ``field_values``, in the form of the engine."""
    values = field_values(text)
    if "stop" in values:
        values["stop"] = list(values["stop"])
    if "logit_bias" in values:
        values["logit_bias"] = [(each.id, each.bias) for each in values["logit_bias"]]
    if "constraint" in values:
        rules = field_values(values["constraint"])
        if "choices" in rules:
            rules["choices"] = list(rules["choices"].texts)
        values["constraint"] = rules
    return values
