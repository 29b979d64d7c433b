"""The skills: converts a request's tensors to a message of kestrel.v1, and the response to the JSON of TEXT_OUTPUT."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.inference import grpc_service_pb2 as inference
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, RequestError

from ..edge.calls.call import Context
from ..edge.failures.errors import LocatedError
from ..services.messages.json_values import (
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
from ..services.vision import VisionService
from .model import INPUTS
from .tensors import Tensor, tensors

_MOST_JSON_CHARACTERS = 64 * 1024
_MOST = 2**31 - 1
_NAMES = {
    "min_score": "THRESHOLD",
    "abstention.objects": "PRESUPPOSES",
    "abstention.max_absence": "MAX_ABSENCE",
}
"""The inputs that have another name than their field of kestrel.v1."""
_CHANNELS = {
    1: common_pb2.PIXEL_FORMAT_GRAY8,
    3: common_pb2.PIXEL_FORMAT_RGB8,
    4: common_pb2.PIXEL_FORMAT_RGBA8,
}

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in the form that a service accepts."""

    message: Any
    """The request of kestrel.v1."""
    behaviour: Callable[[Any, Context], Awaitable[Any]]
    """The service's method. A stream's method writes its messages to the context."""
    streams: bool
    values: Callable[[Any], Values]
    """Converts the response to values for JSON."""

    def piece(self, message: Any) -> Values | None:
        """Converts a message of a stream to values for JSON; None for a message that has no counterpart."""
        kind = message.WhichOneof("event")
        if kind == "text_delta":
            delta = message.text_delta
            return {"chunk": delta.text, "completed": False, "token_index": delta.output_tokens}
        if kind == "reasoning_delta":
            delta = message.reasoning_delta
            return {
                "chunk": "",
                "completed": False,
                "token_index": delta.output_tokens,
                "reasoning_chunk": delta.text,
            }
        if kind == "final":
            return {"chunk": "", "completed": True, **self.values(message.final)}
        return None


def asked(request: inference.ModelInferRequest, vision: VisionService) -> Asked:
    """Raises InvalidRequest."""
    inputs = _Inputs(tensors(request))
    skill = inputs.text("SKILL")
    if skill is None:
        raise InvalidRequest("SKILL", f"is required: one of {', '.join(_SKILLS)}")
    if skill not in _SKILLS:
        shown = skill[:40]
        raise InvalidRequest("SKILL", f"{shown!r} is not one of {', '.join(_SKILLS)}")
    return _SKILLS[skill](inputs, vision)


@contextmanager
def located() -> Iterator[None]:
    """Raises a service's RequestError as a LocatedError that names the input."""
    try:
        yield
    except RequestError as error:
        raise LocatedError(error, _input_of(error.field)) from error


def _input_of(field: str) -> str:
    """Returns the input for a field of kestrel.v1, such as "spatial_refs[2]". Returns other names unchanged."""
    path, bracket, index = field.partition("[")
    name = _NAMES.get(path) or path.removeprefix("sampling.").partition(".")[0].upper()
    return f"{name}{bracket}{index.partition('.')[0]}" if name in INPUTS else field


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
        if "IMAGE" in self._found:
            self._fill_image(request.image)
        elif skill != "query":
            raise InvalidRequest("IMAGE", f"is required for the skill {skill}")
        for name in ("TEMPERATURE", "TOP_P"):
            if name in self._found:
                setattr(request.sampling, name.lower(), self._found[name].only())
        if "THRESHOLD" in self._found and "min_score" in request.DESCRIPTOR.fields_by_name:
            request.min_score = self._found["THRESHOLD"].only()
        if adapter := self.text("ADAPTER"):
            request.options.adapter = adapter
        for name, holder in (
            ("MAX_TOKENS", request.sampling),
            ("MAX_REASONING_TOKENS", request.sampling),
            ("MAX_OBJECTS", request),
        ):
            field = name.lower()
            if name in self._found and field in holder.DESCRIPTOR.fields_by_name:
                setattr(holder, field, self._positive(name))

    def spatial_refs(self) -> list[common_pb2.SpatialRef]:
        """JSON: a list of [x, y] and [x_min, y_min, x_max, y_max]."""
        name = "SPATIAL_REFS"
        refs = []
        for index, item in enumerate(self._items(name, "[x, y] or [x_min, y_min, x_max, y_max]")):
            where = f"{name}[{index}]"
            if not isinstance(item, list) or not all(isinstance(each, float) for each in item):
                raise InvalidRequest(where, "must be a list of numbers")
            refs.append(spatial_ref(item, where))
        return refs

    def fill_abstention(self, request: pb.QueryRequest) -> None:
        """PRESUPPOSES is JSON: a list of names."""
        name = "PRESUPPOSES"
        for index, item in enumerate(self._items(name, "names of objects")):
            if not isinstance(item, str):
                raise InvalidRequest(f"{name}[{index}]", "must be a string")
            try:
                request.abstention.objects.append(item)
            except UnicodeEncodeError:
                raise InvalidRequest(f"{name}[{index}]", "has half of a surrogate pair") from None
        if "MAX_ABSENCE" in self._found and request.HasField("abstention"):
            request.abstention.max_absence = self._found["MAX_ABSENCE"].only()

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

    def _positive(self, name: str) -> int:
        value: int = self._found[name].only()
        if not 1 <= value <= _MOST:
            raise InvalidRequest(name, f"must be in [1, {_MOST}], got {value}")
        return value

    def _fill_image(self, image: common_pb2.Image) -> None:
        """An encoded image as one BYTES element or as UINT8 [n], or pixels as UINT8 [height, width, 1, 3 or 4]. Both
        shapes may begin with a batch of 1."""
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
            and shape[2] in _CHANNELS
            and 0 < shape[0] <= _MOST
            and 0 < shape[1] <= _MOST
        ):
            height, width, depth = shape
            raw = image.raw
            raw.data, raw.width, raw.height, raw.format = data, width, height, _CHANNELS[depth]
        else:
            raise InvalidRequest(
                "IMAGE",
                f"UINT8 must have shape [n] or [height, width, 1, 3 or 4], got {list(tensor.shape)}",
            )


def _query(inputs: _Inputs, vision: VisionService) -> Asked:
    request = pb.QueryRequest(
        question=inputs.required("QUESTION", "query"),
        reasoning=inputs.flag("REASONING"),
        spatial_refs=inputs.spatial_refs(),
    )
    if (system := inputs.text("SYSTEM")) is not None:
        request.system = system
    inputs.fill_abstention(request)
    inputs.fill(request, "query")
    if inputs.flag("STREAM"):
        return Asked(request, vision.StreamQuery, True, _query_values)
    return Asked(request, vision.Query, False, _query_values)


def _caption(inputs: _Inputs, vision: VisionService) -> Asked:
    length = inputs.text("LENGTH") or "normal"
    if length not in CAPTION_LENGTHS:
        raise InvalidRequest("LENGTH", f"must be short, normal or long, got {length[:40]!r}")
    request = pb.CaptionRequest(length=CAPTION_LENGTHS[length])
    inputs.fill(request, "caption")
    if inputs.flag("STREAM"):
        return Asked(request, vision.StreamCaption, True, _caption_values)
    return Asked(request, vision.Caption, False, _caption_values)


def _point(inputs: _Inputs, vision: VisionService) -> Asked:
    request = pb.PointRequest(
        object=inputs.required("OBJECT", "point"), spatial_refs=inputs.spatial_refs()
    )
    inputs.fill(request, "point")
    return Asked(request, vision.Point, False, _point_values)


def _detect(inputs: _Inputs, vision: VisionService) -> Asked:
    request = pb.DetectRequest(object=inputs.required("OBJECT", "detect"))
    inputs.fill(request, "detect")
    return Asked(request, vision.Detect, False, _detect_values)


def _segment(inputs: _Inputs, vision: VisionService) -> Asked:
    request = pb.SegmentRequest(
        object=inputs.required("OBJECT", "segment"), spatial_refs=inputs.spatial_refs()
    )
    if inputs.has("REFINE"):
        request.refine = inputs.flag("REFINE")
    inputs.fill(request, "segment")
    return Asked(request, vision.Segment, False, _segment_values)


_SKILLS = {
    "query": _query,
    "caption": _caption,
    "point": _point,
    "detect": _detect,
    "segment": _segment,
}


def _query_values(response: pb.QueryResponse) -> Values:
    values = _values(response, answer=response.answer)
    if response.HasField("reasoning"):
        values["reasoning"] = reasoning_values(response.reasoning)
    return values | abstention_values(response)


def _caption_values(response: pb.CaptionResponse) -> Values:
    return _values(response, caption=response.caption)


def _point_values(response: pb.PointResponse) -> Values:
    points = [point_values(point) for point in response.points]
    return _values(response, points=points, **absence_values(response))


def _detect_values(response: pb.DetectResponse) -> Values:
    objects = [box_values(box) for box in response.objects]
    return _values(response, objects=objects, **absence_values(response))


def _segment_values(response: pb.SegmentResponse) -> Values:
    return _values(response, **outline_values(response))


def _values(response: Any, **output: Any) -> Values:
    return {
        "request_id": response.request_id,
        "finish_reason": finish_reason(response),
        **output,
        "metrics": metrics_values(response),
    }
