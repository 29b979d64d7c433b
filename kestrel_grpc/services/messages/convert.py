"""Conversions between protobuf messages and the engine's values: pure functions without I/O or state.

A request becomes a SkillCall. This module does not check what the engine checks (ranges, texts, images), so that each
rule stands in one place. A result becomes a message whose coordinates are clipped to the image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from kestrel_engine import (
    EngineMetrics,
    EngineResult,
    InRegion,
    InvalidRequest,
    OnBackground,
    RequestError,
    RuntimeConfig,
    StreamUpdate,
    Tiles,
    TokenLogprob,
    checked_adapter_name,
    settings_of,
)

from ...edge.failures.errors import LocatedError
from ...images.store import ImageId

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_MAX_MODEL_NAME = 512
_MAX_SALT_BYTES = 128
_MAX_IMAGE_ID = 64
MAX_IMAGES = settings_of(RuntimeConfig)["max_images"].high
"""The most that --max-images may be. The engine then applies the server's own limit."""

_BYTES_PER_PIXEL = {
    common_pb2.PIXEL_FORMAT_UNSPECIFIED: 3,
    common_pb2.PIXEL_FORMAT_RGB8: 3,
    common_pb2.PIXEL_FORMAT_RGBA8: 4,
    common_pb2.PIXEL_FORMAT_GRAY8: 1,
    common_pb2.PIXEL_FORMAT_BGR8: 3,
}
_LENGTHS = {
    vision_service_pb2.CAPTION_LENGTH_UNSPECIFIED: "normal",
    vision_service_pb2.CAPTION_LENGTH_SHORT: "short",
    vision_service_pb2.CAPTION_LENGTH_NORMAL: "normal",
    vision_service_pb2.CAPTION_LENGTH_LONG: "long",
}
_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: "normal",
    common_pb2.PRIORITY_LOW: "low",
    common_pb2.PRIORITY_NORMAL: "normal",
    common_pb2.PRIORITY_HIGH: "high",
}
_FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


ImageSource: TypeAlias = bytes | np.ndarray | ImageId | OnBackground | InRegion
"""Encoded bytes; pixels as [height, width(, channels)] uint8 RGB(A); the id of a stored image; one of these with a
background colour; or a region of one of these."""


class LocatedImage(NamedTuple):
    """An image with the path of its field in the request."""

    path: str
    source: ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """A request's options in the form that the engine expects."""

    model: str | None = None
    priority: str = "normal"
    cache_salt: str = ""
    adapter: str | None = None


_NO_OPTIONS = CallOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCall:
    """One request in the form that the engine expects."""

    skill: str
    image: ImageSource | None
    more_images: tuple[LocatedImage, ...] = ()
    """The images after ``image``, in the order of the prompt."""
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    options: CallOptions = _NO_OPTIONS
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


class HasImage(Protocol):
    """A request with an image."""

    @property
    def image(self) -> common_pb2.Image: ...
    def HasField(self, field_name: Any, /) -> bool: ...


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
    call = _call("query", request, image, arguments)
    return replace(call, more_images=tuple(image for _, image in more)) if more else call


def caption_call(request: vision_service_pb2.CaptionRequest) -> SkillCall:
    return _call("caption", request, required_image(request), caption_arguments(request))


def point_call(request: vision_service_pb2.PointRequest) -> SkillCall:
    image = required_image(request)
    call = _call("point", request, image, point_arguments(request), object_settings(request))
    return replace(call, tiles=tiles(request))


def detect_call(request: vision_service_pb2.DetectRequest) -> SkillCall:
    image = required_image(request)
    call = _call("detect", request, image, detect_arguments(request), object_settings(request))
    return replace(call, tiles=tiles(request))


def segment_call(request: vision_service_pb2.SegmentRequest) -> SkillCall:
    image, mask = required_image(request), mask_format(request)
    arguments, settings = segment_arguments(request), min_score(request)
    return _call("segment", request, image, arguments, settings, mask_format=mask)


# A skill's request and its task in Analyze have the same fields, with the same names and numbers.


def query_arguments(
    fields: vision_service_pb2.QueryRequest | vision_service_pb2.QueryTask,
) -> Fields:
    return {
        "question": fields.question,
        "reasoning": fields.reasoning,
        **({"system": fields.system} if fields.system else {}),
        "spatial_refs": spatial_refs(fields.spatial_refs),
        **(
            {"history": [(turn.question, turn.answer) for turn in fields.history]}
            if fields.history
            else {}
        ),
    }


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


@contextmanager
def at_image(path: str) -> Iterator[None]:
    """Raises an error of the field ``image`` as a LocatedError with the image's ``path`` in the request."""
    try:
        yield
    except RequestError as error:
        if not error.field.startswith("image"):
            raise
        raise LocatedError(error, path + error.field.removeprefix("image")) from error


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
    return {"length": known("length", fields.length, vision_service_pb2.CaptionLength, _LENGTHS)}


def point_arguments(
    fields: vision_service_pb2.PointRequest | vision_service_pb2.PointTask,
) -> Fields:
    return {"object": fields.object, "spatial_refs": spatial_refs(fields.spatial_refs)}


def detect_arguments(
    fields: vision_service_pb2.DetectRequest | vision_service_pb2.DetectTask,
) -> Fields:
    return {"object": fields.object}


def segment_arguments(
    fields: vision_service_pb2.SegmentRequest | vision_service_pb2.SegmentTask,
) -> Fields:
    return {
        "object": fields.object,
        "spatial_refs": spatial_refs(fields.spatial_refs),
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
    return {**limit, **overlap, **min_score(fields)}


def tiles(
    request: vision_service_pb2.PointRequest | vision_service_pb2.DetectRequest,
) -> Tiles | None:
    """Raises InvalidRequest."""
    if not request.HasField("tiles"):
        return None
    given = request.tiles
    values: dict[str, Any] = {"rows": given.rows, "columns": given.columns}
    if given.HasField("overlap"):
        values["overlap"] = _short(given.overlap)
    if given.HasField("whole_image"):
        values["whole_image"] = given.whole_image
    return Tiles(**values)


def min_score(
    fields: vision_service_pb2.PointRequest
    | vision_service_pb2.PointTask
    | vision_service_pb2.DetectRequest
    | vision_service_pb2.DetectTask
    | vision_service_pb2.SegmentRequest
    | vision_service_pb2.SegmentTask,
) -> Fields:
    return {"min_score": fields.min_score} if fields.HasField("min_score") else {}


def mask_format(
    fields: vision_service_pb2.SegmentRequest | vision_service_pb2.SegmentTask,
) -> vision_service_pb2.MaskFormat.ValueType:
    formats = {number: number for number in vision_service_pb2.MaskFormat.values()}
    meant: vision_service_pb2.MaskFormat.ValueType = known(
        "mask_format", fields.mask_format, vision_service_pb2.MaskFormat, formats
    )
    return meant


def image_source(image: common_pb2.Image) -> ImageSource:
    """The image of a request: encoded bytes, an ImageId, or raw pixels as an array that shares the message's memory.

    If the request sets a background, the result is an OnBackground of these; with a region, an InRegion of all that.
    Raises InvalidRequest.
    """
    source = _on_background(image)
    if not image.HasField("region"):
        return source
    region = image.region
    edges = (region.x_min, region.y_min, region.x_max, region.y_max)
    return InRegion(source, tuple(map(_short, edges)))  # type: ignore[arg-type]


def _on_background(image: common_pb2.Image) -> bytes | np.ndarray | ImageId | OnBackground:
    source = _source(image)
    if not image.HasField("background"):
        return source
    if not _COLOUR.fullmatch(image.background):
        raise InvalidRequest(
            "image.background", f"{image.background!r} must be a colour like #ffffff"
        )
    red, green, blue = bytes.fromhex(image.background[1:])
    return OnBackground(source, (red, green, blue))  # type: ignore[arg-type]  # images.store resolves ids


def _source(image: common_pb2.Image) -> bytes | np.ndarray | ImageId:
    source = image.WhichOneof("source")
    if source == "encoded":
        return image.encoded
    if source == "raw":
        return _raw_pixels(image.raw)
    if source == "image_id":
        return image_id("image.image_id", image.image_id)
    raise InvalidRequest("image", "holds no image: set encoded, raw or image_id")


def image_id(field: str, text: str) -> ImageId:
    """Raises InvalidRequest, which names ``field``, if ``text`` cannot be an id."""
    if not 1 <= len(text) <= _MAX_IMAGE_ID:
        raise InvalidRequest(
            field, f"has {len(text)} characters; an image id has 1 to {_MAX_IMAGE_ID}"
        )
    return ImageId(text)


def _raw_pixels(raw: common_pb2.RawImage) -> np.ndarray:
    depth = known("image.raw.format", raw.format, common_pb2.PixelFormat, _BYTES_PER_PIXEL)
    for side, length in (("width", raw.width), ("height", raw.height)):
        if length < 1:
            raise InvalidRequest(f"image.raw.{side}", "must be at least 1")
    expected = raw.width * raw.height * depth
    data = raw.data
    if len(data) != expected:
        raise InvalidRequest(
            "image.raw.data",
            f"has {len(data)} bytes; {raw.width}x{raw.height} pixels of {depth} bytes need {expected}",
        )
    pixels = np.frombuffer(data, np.uint8).reshape(raw.height, raw.width, depth)
    return pixels[:, :, ::-1] if raw.format == common_pb2.PIXEL_FORMAT_BGR8 else pixels


def spatial_refs(refs: Sequence[common_pb2.SpatialRef]) -> list[tuple[float, ...]]:
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


def call_options(options: common_pb2.RequestOptions) -> CallOptions:
    """Raises InvalidRequest."""
    priority = known("priority", options.priority, common_pb2.Priority, _PRIORITIES)
    model = options.model if options.HasField("model") else None
    if model is not None and not 1 <= len(model) <= _MAX_MODEL_NAME:
        raise InvalidRequest("model", f"must have 1 to {_MAX_MODEL_NAME} characters")
    salt = options.cache_salt
    if (size := len(salt.encode())) > _MAX_SALT_BYTES:
        raise InvalidRequest(
            "cache_salt", f"has {size} UTF-8 bytes; the limit is {_MAX_SALT_BYTES}"
        )
    adapter = checked_adapter_name(options.adapter) if options.HasField("adapter") else None
    return CallOptions(model=model, priority=priority, cache_salt=salt, adapter=adapter)


def sampling_settings(sampling: common_pb2.Sampling) -> dict[str, Any]:
    """The values of the fields that are set, by name."""
    values = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    if "stop" in values:
        values["stop"] = list(values["stop"])
    if "logit_bias" in values:
        values["logit_bias"] = [(each.id, each.bias) for each in values["logit_bias"]]
    if "constraint" in values:
        constraint = values["constraint"]
        values["constraint"] = {each.name: value for each, value in constraint.ListFields()}
    return values


def required_image(request: HasImage) -> ImageSource:
    if not request.HasField("image"):
        raise InvalidRequest("image", "is required")
    return image_source(request.image)


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
        options=call_options(request.options) if request.HasField("options") else _NO_OPTIONS,
        mask_format=mask_format,
    )


def known(name: str, number: int, enum: Any, meanings: Mapping[Any, Any]) -> Any:
    """The meaning of an enum's number. Raises InvalidRequest for a number that this version does not define."""
    if number not in meanings:
        raise InvalidRequest(name, f"{number} is not a value of {enum.DESCRIPTOR.name}")
    return meanings[number]


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
                    points=[point({"x": x, "y": y}) for x, y in span["points"]],
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
        logprobs=logprobs(result),
        **shared_fields(result, image_positions),
    )


def caption_response(
    result: EngineResult, image_positions: int
) -> vision_service_pb2.CaptionResponse:
    return vision_service_pb2.CaptionResponse(
        caption=result.output["caption"],
        logprobs=logprobs(result),
        **shared_fields(result, image_positions),
    )


def point_response(result: EngineResult, image_positions: int) -> vision_service_pb2.PointResponse:
    return vision_service_pb2.PointResponse(
        points=[point(found) for found in result.output["points"]],
        absence=result.absence,
        **shared_fields(result, image_positions),
    )


def detect_response(
    result: EngineResult, image_positions: int
) -> vision_service_pb2.DetectResponse:
    return vision_service_pb2.DetectResponse(
        objects=[box(found) for found in result.output["objects"]],
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
        box=box(segment["bbox"]) if "bbox" in segment else None,
        score=segment.get("score"),
        parse_error=segment.get("parse_error"),
        coarse_path=segment["coarse_path"] if segment.get("refined") else None,
        coarse_box=box(segment["coarse_bbox"]) if segment.get("refined") else None,
        **shared_fields(result, image_positions),
    )


def event(update: StreamUpdate) -> dict[str, Any]:
    """The one field of a stream event that holds the update, by name."""
    tokens = update.token_index
    if update.text:
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
    return {"object": box(update.object) if "x_min" in update.object else point(update.object)}


def logprobs(result: EngineResult) -> common_pb2.Logprobs | None:
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


def point(found: Mapping[str, float]) -> common_pb2.Point:
    return common_pb2.Point(x=_clip(found["x"]), y=_clip(found["y"]), score=found.get("score"))


def box(found: Mapping[str, float]) -> common_pb2.Box:
    """The part of the box that lies in the image. It is never empty, because a box's centre lies in the image."""
    return common_pb2.Box(
        x_min=_clip(found["x_min"]),
        y_min=_clip(found["y_min"]),
        x_max=_clip(found["x_max"]),
        y_max=_clip(found["y_max"]),
        score=found.get("score"),
    )


def usage(metrics: EngineMetrics, image_tokens: int) -> common_pb2.Usage:
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
        queue_time_ms=milliseconds(metrics.queue_time_ms),
        ttft_ms=milliseconds(metrics.ttft_ms),
        total_time_ms=milliseconds(total_time_ms),
    )


def timings(metrics: EngineMetrics) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_time_ms=milliseconds(metrics.queue_time_ms),
        preprocess_time_ms=milliseconds(metrics.preprocess_time_ms),
        prefill_time_ms=milliseconds(metrics.prefill_time_ms),
        decode_time_ms=milliseconds(metrics.decode_time_ms),
        ttft_ms=milliseconds(metrics.ttft_ms),
        processing_time_ms=milliseconds(metrics.processing_time_ms),
        total_time_ms=milliseconds(metrics.total_time_ms),
    )


def milliseconds(duration_ms: float) -> float:
    """Rounded to microseconds, because further digits are noise of the clock."""
    return round(duration_ms, 3)


def seconds(duration_s: float) -> float:
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
        "usage": usage(metrics, image_positions * len(result.images) * result.num_looks),
        "timings": timings(metrics),
        "model": result.model,
        "request_id": result.request_id,
        "image_size": None if size is None else _image_size(size),
        "seed": result.seed,
    }


def _short(value: float) -> float:
    """The number that the caller meant: 0.1 for the float32 next to it."""
    return float(str(np.float32(value)))


def _clip(value: float) -> float:
    return min(1.0, max(0.0, value))
