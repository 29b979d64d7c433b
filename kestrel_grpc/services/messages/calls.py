"""From the request of a skill's method to a SkillCall: pure functions without I/O or state.

This module does not check what the engine checks (ranges, texts, images), so that each rule stands in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from kestrel_engine import InvalidRequest, Tiles

from .images import (
    MAX_IMAGES,
    HasImage,
    ImageSource,
    LocatedImage,
    at_image,
    image_source,
    required_image,
)
from .options import NO_OPTIONS, CallOptions, call_options, sampling_settings
from .values import known_value, meant_float

_LENGTHS = {
    vision_service_pb2.CAPTION_LENGTH_UNSPECIFIED: "normal",
    vision_service_pb2.CAPTION_LENGTH_SHORT: "short",
    vision_service_pb2.CAPTION_LENGTH_NORMAL: "normal",
    vision_service_pb2.CAPTION_LENGTH_LONG: "long",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCall:
    """One request in the form that the engine expects."""

    skill: str
    image: ImageSource | None
    more_images: tuple[LocatedImage, ...] = ()
    """The images after ``image``, in the order of the prompt."""
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    options: CallOptions = NO_OPTIONS
    mask_format: vision_service_pb2.MaskFormat.ValueType = (
        vision_service_pb2.MASK_FORMAT_UNSPECIFIED
    )
    tiles: Tiles | None = None
    """How to cut the image; None: not at all."""

    @property
    def images(self) -> tuple[LocatedImage, ...]:
        """All images, in the order of the prompt."""
        first = () if self.image is None else (LocatedImage("image", self.image),)
        return (*first, *self.more_images)


class Request(HasImage, Protocol):
    """The fields that the requests of all five skills have."""

    @property
    def sampling(self) -> common_pb2.Sampling: ...
    @property
    def options(self) -> common_pb2.RequestOptions: ...


Fields = Mapping[str, Any]
"""A skill's arguments, or its settings other than sampling."""


def query_call(request: vision_service_pb2.QueryRequest) -> SkillCall:
    image = image_source(request.image) if request.HasField("image") else None
    arguments, more = query_arguments(request), _more_images(request)
    if more:
        turns = [*([] if image is None else [0]), *(turn for turn, _ in more)]
        arguments = {**arguments, "image_turns": turns}
    call = _call("query", request, image, arguments, query_settings(request))
    return replace(call, more_images=tuple(image for _, image in more)) if more else call


def caption_call(request: vision_service_pb2.CaptionRequest) -> SkillCall:
    return _call("caption", request, required_image(request), caption_arguments(request))


def point_call(request: vision_service_pb2.PointRequest) -> SkillCall:
    image = required_image(request)
    call = _call("point", request, image, point_arguments(request), object_settings(request))
    return replace(call, tiles=read_tiles(request))


def detect_call(request: vision_service_pb2.DetectRequest) -> SkillCall:
    image = required_image(request)
    call = _call("detect", request, image, detect_arguments(request), object_settings(request))
    return replace(call, tiles=read_tiles(request))


def segment_call(request: vision_service_pb2.SegmentRequest) -> SkillCall:
    image, mask = required_image(request), read_mask_format(request)
    arguments, settings = segment_arguments(request), score_setting(request)
    return _call("segment", request, image, arguments, settings, mask_format=mask)


# A skill's request and its task in Analyze have the same fields, with the same names and numbers.


def query_arguments(
    fields: vision_service_pb2.QueryRequest | vision_service_pb2.QueryTask,
) -> Fields:
    return {
        "question": fields.question,
        "reasoning": fields.reasoning,
        **({"system": fields.system} if fields.system else {}),
        **({"answer_start": fields.answer_start} if fields.answer_start else {}),
        "spatial_refs": read_spatial_refs(fields.spatial_refs),
        **(
            {"history": [(turn.question, turn.answer) for turn in fields.history]}
            if fields.history
            else {}
        ),
        **(
            {"presupposes": list(fields.abstention.objects)}
            if fields.HasField("abstention")
            else {}
        ),
    }


def query_settings(
    fields: vision_service_pb2.QueryRequest | vision_service_pb2.QueryTask,
) -> Fields:
    """Raises InvalidRequest."""
    abstention = fields.abstention
    if fields.HasField("abstention") and not abstention.objects:
        raise InvalidRequest("abstention.objects", "is empty: name the objects of the question")
    if not abstention.HasField("max_absence"):
        return {}
    return {"max_absence": meant_float(abstention.max_absence)}


def _more_images(request: vision_service_pb2.QueryRequest) -> list[tuple[int, LocatedImage]]:
    """The images of the turns and of the question, each with the number of its turn. Raises InvalidRequest."""
    shown = [
        (turn, f"history[{turn}].images", each.images) for turn, each in enumerate(request.history)
    ]
    shown.append((len(shown), "images", request.images))
    found: list[tuple[int, LocatedImage]] = []
    for turn, field, images in shown:
        for index, image in enumerate(images):
            path = f"{field}[{index}]"
            if len(found) == MAX_IMAGES:
                raise InvalidRequest(path, f"is one image too many; the limit is {MAX_IMAGES}")
            with at_image(path):
                found.append((turn, LocatedImage(path, image_source(image))))
    return found


def query_task_arguments(fields: vision_service_pb2.QueryTask) -> Fields:
    """Raises InvalidRequest if a turn has images."""
    for index, turn in enumerate(fields.history):
        if turn.images:
            raise InvalidRequest(
                f"history[{index}].images",
                "must be empty: all tasks are about one image; use Query",
            )
    return query_arguments(fields)


def caption_arguments(
    fields: vision_service_pb2.CaptionRequest | vision_service_pb2.CaptionTask,
) -> Fields:
    return {
        "length": known_value("length", fields.length, vision_service_pb2.CaptionLength, _LENGTHS)
    }


def point_arguments(
    fields: vision_service_pb2.PointRequest | vision_service_pb2.PointTask,
) -> Fields:
    return {"object": fields.object, "spatial_refs": read_spatial_refs(fields.spatial_refs)}


def detect_arguments(
    fields: vision_service_pb2.DetectRequest | vision_service_pb2.DetectTask,
) -> Fields:
    return {"object": fields.object}


def segment_arguments(
    fields: vision_service_pb2.SegmentRequest | vision_service_pb2.SegmentTask,
) -> Fields:
    return {
        "object": fields.object,
        "spatial_refs": read_spatial_refs(fields.spatial_refs),
        **({"refine": fields.refine} if fields.HasField("refine") else {}),
    }


def object_settings(
    fields: vision_service_pb2.PointRequest
    | vision_service_pb2.PointTask
    | vision_service_pb2.DetectRequest
    | vision_service_pb2.DetectTask,
) -> Fields:
    limit = {"max_objects": fields.max_objects} if fields.HasField("max_objects") else {}
    overlap: dict[str, Any] = {}
    if isinstance(fields, (vision_service_pb2.DetectRequest, vision_service_pb2.DetectTask)):
        overlap = {"max_overlap": fields.max_overlap} if fields.HasField("max_overlap") else {}
    return {**limit, **overlap, **score_setting(fields)}


def read_tiles(
    request: vision_service_pb2.PointRequest | vision_service_pb2.DetectRequest,
) -> Tiles | None:
    """Raises InvalidRequest."""
    if not request.HasField("tiles"):
        return None
    given = request.tiles
    values: dict[str, Any] = {"rows": given.rows, "columns": given.columns}
    if given.HasField("overlap"):
        values["overlap"] = meant_float(given.overlap)
    if given.HasField("whole_image"):
        values["whole_image"] = given.whole_image
    return Tiles(**values)


def score_setting(
    fields: vision_service_pb2.PointRequest
    | vision_service_pb2.PointTask
    | vision_service_pb2.DetectRequest
    | vision_service_pb2.DetectTask
    | vision_service_pb2.SegmentRequest
    | vision_service_pb2.SegmentTask,
) -> Fields:
    return {"min_score": fields.min_score} if fields.HasField("min_score") else {}


def read_mask_format(
    fields: vision_service_pb2.SegmentRequest | vision_service_pb2.SegmentTask,
) -> vision_service_pb2.MaskFormat.ValueType:
    formats = {number: number for number in vision_service_pb2.MaskFormat.values()}
    meant: vision_service_pb2.MaskFormat.ValueType = known_value(
        "mask_format", fields.mask_format, vision_service_pb2.MaskFormat, formats
    )
    return meant


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
            raise InvalidRequest(f"spatial_refs[{index}]", "is empty: set point or box")
    return values


def _call(
    skill: str,
    request: Request,
    image: ImageSource | None,
    arguments: Fields,
    settings: Fields | None = None,
    mask_format: vision_service_pb2.MaskFormat.ValueType = vision_service_pb2.MASK_FORMAT_UNSPECIFIED,
) -> SkillCall:
    return SkillCall(
        skill=skill,
        image=image,
        arguments=arguments,
        settings={**sampling_settings(request.sampling), **(settings or {})},
        options=call_options(request.options) if request.HasField("options") else NO_OPTIONS,
        mask_format=mask_format,
    )
