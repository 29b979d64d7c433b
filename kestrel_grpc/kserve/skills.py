"""The skills: converts a request's tensors to a message of kestrel.v1, and the response to the JSON of TEXT_OUTPUT."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.inference import grpc_service_pb2 as inference
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

from ..edge.calls.call import Context
from ..images.request_images import PIXEL_FORMATS
from ..services.messages.json_values import (
    CAPTION_LENGTHS,
    REFINEMENTS,
    Response,
    call_values,
    skill_values,
    spatial_ref,
)
from ..services.messages.task_fields import REQUESTS, holder, short_path
from ..services.vision import VisionService
from .model import INPUTS
from .tensors import Tensor, tensors

_MOST_JSON_CHARACTERS = 64 * 1024
_MOST = 2**31 - 1
_NAMES: dict[FieldPath, str] = {
    ("image",): "IMAGE",
    ("images",): "IMAGE",
    ("images", 0): "IMAGE",
    ("image", "max_crops"): "MAX_CROPS",
    ("images", 0, "max_crops"): "MAX_CROPS",
    ("objects",): "OBJECT",
    ("objects", 0): "OBJECT",
    ("min_score",): "THRESHOLD",
    ("abstention", "objects"): "PRESUPPOSES",
    ("abstention", "max_absence"): "MAX_ABSENCE",
    ("refinement",): "REFINE",
    ("eyes",): "SPATIAL_REFS",
    ("faces",): "SPATIAL_REFS",
    ("max_faces",): "MAX_OBJECTS",
    ("options", "adapter"): "ADAPTER",
    ("options", "model"): "model_name",
}
"""The inputs that have another name than their field of kestrel.v1."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VisionCall:
    """A request in the form that a service accepts."""

    message: Any
    """The request of kestrel.v1."""
    behaviour: Callable[[Any, Context], Awaitable[Any]]
    """The service's method. A stream's method writes its messages to the context."""
    streams: bool

    def piece(self, message: Any) -> Values | None:
        """Converts a message of a stream to values for JSON; None for a message that has no counterpart."""
        kind = message.WhichOneof("event")
        if kind in ("text_delta", "reasoning_delta"):
            delta, is_text = getattr(message, kind), kind == "text_delta"
            text = (
                {"chunk": delta.text} if is_text else {"chunk": "", "reasoning_chunk": delta.text}
            )
            return {**text, "completed": False, "token_index": delta.output_tokens}
        if kind == "final":
            return {"chunk": "", "completed": True, **output_values(message.final)}
        return None


def vision_call(request: inference.ModelInferRequest, vision: VisionService) -> VisionCall:
    """Raises InvalidRequest."""
    inputs = _Inputs(tensors(request))
    skill = inputs.text("SKILL")
    if skill is None:
        raise InvalidRequest("SKILL", f"is required: one of {', '.join(_READERS)}")
    if skill not in _READERS:
        shown = skill[:40]
        raise InvalidRequest("SKILL", f"{shown!r} is not one of {', '.join(_READERS)}")
    message = REQUESTS[skill]()
    _READERS[skill](getattr(message, skill), inputs)
    inputs.fill(message, skill)
    streams = skill in _STREAMED and inputs.flag("STREAM")
    behaviour = getattr(vision, f"{'Stream' if streams else ''}{skill.title()}")
    return VisionCall(message, behaviour, streams)


def output_values(response: Response) -> Values:
    """Converts the response of a skill to values for JSON."""
    return skill_values(response) | call_values(response)


def input_path(path: FieldPath) -> FieldPath:
    """The input for a field of kestrel.v1, such as ``("query", "spatial_refs", 2)``, and the number of an item in it.
    Returns other paths unchanged."""
    short = short_path(path)
    for length in (3, 2, 1):
        name = _NAMES.get(short[:length])
        if name is not None:
            return (name, *(part for part in short[length:] if isinstance(part, int)))
    name = str(short[0]).upper()
    return (
        (name, *(each for each in short[1:2] if isinstance(each, int))) if name in INPUTS else path
    )


class _Inputs:
    """The inputs by name. An input is read when a method needs it. All methods raise InvalidRequest."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        for name, tensor in found.items():
            known = INPUTS.get(name)
            if known is None:
                raise InvalidRequest(
                    name[:40] or "inputs",
                    f"is not an input of the model; its inputs are {', '.join(INPUTS)}",
                )
            if tensor.datatype not in known.datatypes:
                wanted = " or ".join(known.datatypes)
                raise InvalidRequest(
                    name, f"has datatype {tensor.datatype[:20]!r}; it must be {wanted}"
                )
        self._found = found

    def text(self, name: str) -> str | None:
        """None if the input is not given."""
        if name not in self._found:
            return None
        try:
            return str(self._found[name].only(), "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(name, f"is not UTF-8: byte {error.start} is invalid") from None

    def required(self, name: str, skill: str) -> str:
        text = self.text(name)
        if text is None:
            raise InvalidRequest(name, f"is required for the skill {skill}")
        return text

    def has(self, name: str) -> bool:
        return name in self._found

    def flag(self, name: str) -> bool:
        return name in self._found and bool(self._found[name].only())

    def fill(self, request: Any, skill: str) -> None:
        """Image, sampling and the number of objects, which the requests of all skills share."""
        task = getattr(request, skill)
        if "IMAGE" in self._found:
            self._fill_image(request.images.add() if skill == "query" else request.image)
        elif skill != "query":
            raise InvalidRequest("IMAGE", f"is required for the skill {skill}")
        elif "MAX_CROPS" in self._found:
            raise InvalidRequest("MAX_CROPS", "needs IMAGE")
        for name in ("TEMPERATURE", "TOP_P"):
            if name in self._found:
                setattr(task.sampling, name.lower(), self._found[name].only())
        if "THRESHOLD" in self._found and "min_score" in task.DESCRIPTOR.fields_by_name:
            task.min_score = self._found["THRESHOLD"].only()
        if adapter := self.text("ADAPTER"):
            request.options.adapter = adapter
        for name in ("MAX_TOKENS", "MAX_REASONING_TOKENS"):
            if name in self._found:
                value = self.positive(name)
                setattr(holder(task, name.lower(), name), name.lower(), value)
        if "MAX_OBJECTS" in self._found and "max_objects" in task.DESCRIPTOR.fields_by_name:
            task.max_objects = self.positive("MAX_OBJECTS")

    def spatial_refs(self) -> list[common_pb2.SpatialRef]:
        """JSON: a list of [x, y] and [x_min, y_min, x_max, y_max]."""
        name = "SPATIAL_REFS"
        refs = []
        for index, item in enumerate(self._items(name, "[x, y] or [x_min, y_min, x_max, y_max]")):
            where = (name, index)
            if not isinstance(item, list) or not all(isinstance(each, float) for each in item):
                raise InvalidRequest(where, "must be a list of numbers")
            refs.append(spatial_ref(item, where))
        return refs

    def fill_abstention(self, task: pb.QueryTask) -> None:
        """PRESUPPOSES is JSON: a list of names."""
        name = "PRESUPPOSES"
        for index, item in enumerate(self._items(name, "names of objects")):
            if not isinstance(item, str):
                raise InvalidRequest((name, index), "must be a string")
            try:
                task.abstention.objects.append(item)
            except UnicodeEncodeError:
                raise InvalidRequest((name, index), "has half of a surrogate pair") from None
        if "MAX_ABSENCE" in self._found and task.HasField("abstention"):
            task.abstention.max_absence = self._found["MAX_ABSENCE"].only()

    def _items(self, name: str, what: str) -> list[Any]:
        """The list that an input holds as JSON. Empty if the input is not given or empty."""
        text = self.text(name)
        if not text:
            return []
        if len(text) > _MOST_JSON_CHARACTERS:
            raise InvalidRequest(
                name, f"has {len(text)} characters; the limit is {_MOST_JSON_CHARACTERS}"
            )
        try:
            items = json.loads(text, parse_int=float)
        except (ValueError, RecursionError):
            raise InvalidRequest(name, f"is not valid JSON; it must be a list of {what}") from None
        if not isinstance(items, list):
            raise InvalidRequest(name, f"must be a list of {what}")
        return items

    def positive(self, name: str) -> int:
        value: int = self._found[name].only()
        if not 1 <= value <= _MOST:
            raise InvalidRequest(name, f"must be in [1, {_MOST}], got {value}")
        return value

    def _fill_image(self, image: common_pb2.Image) -> None:
        """An encoded image as one BYTES element or as UINT8 [n], or pixels as UINT8 [height, width, 1, 3 or 4]. Both
        shapes may begin with a batch of 1."""
        if "MAX_CROPS" in self._found:
            image.max_crops = self.positive("MAX_CROPS")
        tensor = self._found["IMAGE"]
        if tensor.datatype != "UINT8":
            image.encoded = tensor.only()
            return
        data, shape = tensor.octets(), tensor.shape
        if len(shape) in (2, 4) and shape[0] == 1:
            shape = shape[1:]
        if len(shape) == 1:
            image.encoded = data
        elif (
            len(shape) == 3
            and shape[2] in PIXEL_FORMATS
            and 0 < shape[0] <= _MOST
            and 0 < shape[1] <= _MOST
        ):
            height, width, depth = shape
            raw = image.raw
            raw.data, raw.width, raw.height, raw.format = data, width, height, PIXEL_FORMATS[depth]
        else:
            raise InvalidRequest(
                "IMAGE",
                f"UINT8 must have shape [n] or [height, width, 1, 3 or 4], got {list(tensor.shape)}",
            )


def _query(task: pb.QueryTask, inputs: _Inputs) -> None:
    task.question = inputs.required("QUESTION", "query")
    task.reasoning = inputs.flag("REASONING")
    task.spatial_refs.extend(inputs.spatial_refs())
    task.system = inputs.text("SYSTEM") or ""
    inputs.fill_abstention(task)


def _caption(task: pb.CaptionTask, inputs: _Inputs) -> None:
    length = inputs.text("LENGTH") or "normal"
    if length not in CAPTION_LENGTHS:
        raise InvalidRequest("LENGTH", f"must be short, normal or long, got {length[:40]!r}")
    task.length = CAPTION_LENGTHS[length]


def _point(task: pb.PointTask, inputs: _Inputs) -> None:
    task.objects.append(inputs.required("OBJECT", "point"))
    task.spatial_refs.extend(inputs.spatial_refs())


def _detect(task: pb.DetectTask, inputs: _Inputs) -> None:
    task.objects.append(inputs.required("OBJECT", "detect"))


def _segment(task: pb.SegmentTask, inputs: _Inputs) -> None:
    task.objects.append(inputs.required("OBJECT", "segment"))
    task.spatial_refs.extend(inputs.spatial_refs())
    if inputs.has("REFINE"):
        task.refinement = REFINEMENTS[inputs.flag("REFINE")]


def _gaze(task: pb.GazeTask, inputs: _Inputs) -> None:
    """The output has one gaze, or those of all faces that the model finds."""
    places = inputs.spatial_refs()
    if len(places) > 1:
        raise InvalidRequest(
            "SPATIAL_REFS",
            f"has {len(places)} places; gaze takes an eye [x, y], a face [x_min, y_min, x_max, y_max], or none for all "
            "faces",
        )
    for place in places:
        if place.HasField("point"):
            task.eyes.append(place.point)
        else:
            task.faces.append(place.box)
    task.accurate = inputs.flag("ACCURATE")
    if inputs.has("MAX_OBJECTS"):
        task.max_faces = inputs.positive("MAX_OBJECTS")


_READERS: dict[str, Callable[[Any, _Inputs], None]] = {
    "query": _query,
    "caption": _caption,
    "point": _point,
    "detect": _detect,
    "segment": _segment,
    "gaze": _gaze,
}
_STREAMED = ("query", "caption")
"""The skills that the input STREAM applies to."""
