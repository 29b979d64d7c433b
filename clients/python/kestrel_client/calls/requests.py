"""From arguments to messages, the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypedDict, TypeVar

from google.protobuf.message import Message

from .._pb.kestrel.v1 import common_pb2
from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..connection import Connection, Metadata
from ..drawing.marks import MaskFormat
from ..errors import InvalidRequestError, RequestTooLargeError
from ..images.images import ImageInput, loaded, to_image
from ..values.geometry import SpatialRef, to_spatial_refs
from ..values.results import (
    CaptionResult,
    DetectResult,
    PointResult,
    QueryResult,
    SegmentResult,
    SkillResult,
    caption_result,
    detect_result,
    point_result,
    query_result,
    segment_result,
    skill_result,
)
from ..values.struct_values import to_struct
from ..values.tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
    Tasks,
    analyze_result,
    keyed,
    read_task_event,
)
from .streams import Reading

CaptionLength: TypeAlias = Literal["short", "normal", "long"]
Priority: TypeAlias = Literal["low", "normal", "high"]


class HandlingOptions(TypedDict, total=False):
    """How a call is handled. What is left out, or None, is the server's to decide."""

    model: str | None
    """Name of the model that must answer."""
    request_id: str | None
    """Your name for the request: 1 to 128 visible ASCII characters."""
    priority: Priority | None
    """How urgent the request is compared with others that wait."""
    cache_salt: str | None
    """Computation is reused among calls of the same salt only; at most 128 bytes of UTF-8."""
    background: str | None
    """Colour on which a transparent picture is laid, like "#ffffff"; without one its alpha is dropped."""
    timeout: float | None
    """Seconds for the whole call; default: the client's. A request that still waits by then is never computed."""
    metadata: Metadata | None
    """Sent with the call, after the client's own."""


class CallOptions(HandlingOptions, total=False):
    """What every skill takes beside its own arguments. What is left out, or None, is the server's to decide."""

    temperature: float | None
    """0 is greedy; in [0, 100]."""
    top_p: float | None
    """In (0, 1]."""
    top_k: int | None
    """At least 0; 0 keeps all tokens."""
    max_tokens: int | None
    """Most tokens to generate, at least 1; with reasoning, for the reasoning and for the answer each. A point takes 2,
    a box 3; an object that is not complete is left out."""
    seed: int | None
    """In [0, 2^64): the same seed and request give the same result."""


_CAPTION_LENGTHS = {
    "short": pb.CAPTION_LENGTH_SHORT,
    "normal": pb.CAPTION_LENGTH_NORMAL,
    "long": pb.CAPTION_LENGTH_LONG,
}
_PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
_MASK_FORMATS = {
    "none": pb.MASK_FORMAT_NONE,
    "svg": pb.MASK_FORMAT_SVG,
    "png": pb.MASK_FORMAT_PNG,
    "rle": pb.MASK_FORMAT_RLE,
}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_HANDLING = ("model", "request_id", "priority", "cache_salt")

_STREAM_WRAPPER_BYTES = 16
"""What a stream's request adds around the request: a tag and a length."""

_Q = TypeVar("_Q", bound=Message)
_R = TypeVar("_R")
_E = TypeVar("_E")


@dataclass(frozen=True, slots=True)
class Prepared(Generic[_Q, _R]):
    """A request ready to be sent, and how to read its answer (the response message of its method)."""

    request: _Q
    reading: Reading[_R]
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


class Preparer:
    """Makes requests for one connection. Every method waits for the file system if the picture is a path.

    All raise InvalidRequestError for what can't be sent.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def query(
        self,
        image: ImageInput | None,
        question: str,
        reasoning: bool | None,
        spatial_refs: Iterable[SpatialRef],
        options: CallOptions,
    ) -> Prepared[pb.QueryRequest, QueryResult]:
        image = None if image is None else self._loaded(image)
        request = _build(
            pb.QueryRequest,
            image=None if image is None else self._image(image, options),
            question=question,
            reasoning=reasoning,
            spatial_refs=to_spatial_refs(spatial_refs),
            **_shared(options),
        )
        return self._prepared(request, lambda reply: query_result(reply, image, question), options)

    def caption(
        self, image: ImageInput, length: CaptionLength, options: CallOptions
    ) -> Prepared[pb.CaptionRequest, CaptionResult]:
        image = self._loaded(image)
        request = _build(
            pb.CaptionRequest,
            image=self._image(image, options),
            length=_choice("length", length, _CAPTION_LENGTHS),
            **_shared(options),
        )
        return self._prepared(request, lambda reply: caption_result(reply, image), options)

    def point(
        self,
        image: ImageInput,
        object: str,
        max_objects: int | None,
        spatial_refs: Iterable[SpatialRef],
        options: CallOptions,
    ) -> Prepared[pb.PointRequest, PointResult]:
        image = self._loaded(image)
        request = _build(
            pb.PointRequest,
            image=self._image(image, options),
            object=object,
            max_objects=max_objects,
            spatial_refs=to_spatial_refs(spatial_refs),
            **_shared(options),
        )
        return self._prepared(request, lambda reply: point_result(reply, image, object), options)

    def detect(
        self, image: ImageInput, object: str, max_objects: int | None, options: CallOptions
    ) -> Prepared[pb.DetectRequest, DetectResult]:
        image = self._loaded(image)
        request = _build(
            pb.DetectRequest,
            image=self._image(image, options),
            object=object,
            max_objects=max_objects,
            **_shared(options),
        )
        return self._prepared(request, lambda reply: detect_result(reply, image, object), options)

    def segment(
        self,
        image: ImageInput,
        object: str,
        spatial_refs: Iterable[SpatialRef],
        mask: MaskFormat,
        options: CallOptions,
    ) -> Prepared[pb.SegmentRequest, SegmentResult]:
        image = self._loaded(image)
        request = _build(
            pb.SegmentRequest,
            image=self._image(image, options),
            object=object,
            spatial_refs=to_spatial_refs(spatial_refs),
            mask_format=_choice("mask", mask, _MASK_FORMATS),
            **_shared(options),
        )
        return self._prepared(request, lambda reply: segment_result(reply, image, object), options)

    def analyze(
        self, image: ImageInput, tasks: Tasks, options: HandlingOptions
    ) -> Prepared[pb.AnalyzeRequest, AnalyzeResult]:
        image = self._loaded(image)
        asked = keyed(tasks)
        request = _build(
            pb.AnalyzeRequest,
            image=self._image(image, options),
            tasks=[_task(key, task) for key, task in asked.items()],
            options=_handling(options, HandlingOptions),
        )
        reading = Reading(
            lambda reply: analyze_result(reply, asked, image),
            lambda message, payload: read_task_event(message, payload, asked, image),
        )
        return self._prepared(request, reading, options)

    def run_skill(
        self,
        skill: str,
        image: ImageInput | None,
        arguments: Mapping[str, Any] | None,
        settings: Mapping[str, Any] | None,
        options: CallOptions,
    ) -> Prepared[pb.RunSkillRequest, SkillResult]:
        image = None if image is None else self._loaded(image)
        request = _build(
            pb.RunSkillRequest,
            skill=skill,
            image=None if image is None else self._image(image, options),
            arguments=to_struct("arguments", arguments),
            settings=to_struct("settings", settings),
            **_shared(options),
        )
        return self._prepared(request, lambda reply: skill_result(reply, image, skill), options)

    def _loaded(self, image: ImageInput) -> ImageInput:
        return loaded(image, self._connection.max_message_bytes)

    def _image(self, image: ImageInput, options: HandlingOptions) -> common_pb2.Image:
        message = to_image(image, self._connection.max_message_bytes)
        if (background := options.get("background")) is not None:
            if not isinstance(background, str):
                raise InvalidRequestError(f"background={background!r}: must be like '#ffffff'")
            message.background = background
        return message

    def task(
        self, image: ImageInput, task: Task, options: HandlingOptions
    ) -> tuple[str, Prepared[Any, Any]]:
        """A task as a call of its own: the method's name, and what to send. The task's sampling is its own."""
        sampling = {name: getattr(task, name) for name in _SAMPLING}
        both: CallOptions = {**options, **sampling}  # type: ignore[typeddict-item]
        match task:
            case QueryTask():
                question = (task.question, task.reasoning, task.spatial_refs)
                return "Query", self.query(image, *question, both)
            case CaptionTask():
                return "Caption", self.caption(image, task.length, both)
            case PointTask():
                wanted = (task.object, task.max_objects, task.spatial_refs)
                return "Point", self.point(image, *wanted, both)
            case DetectTask():
                return "Detect", self.detect(image, task.object, task.max_objects, both)
            case SegmentTask():
                outline = (task.object, task.spatial_refs, task.mask)
                return "Segment", self.segment(image, *outline, both)
        raise InvalidRequestError(f"task: {task!r} is no task, like QueryTask")

    def _prepared(
        self,
        request: _Q,
        reading: Reading[_R] | Callable[[Any], _R],
        options: HandlingOptions,
    ) -> Prepared[_Q, _R]:
        size, limit = request.ByteSize() + _STREAM_WRAPPER_BYTES, self._connection.max_message_bytes
        if size > limit:
            raise RequestTooLargeError(size, limit)
        return Prepared(
            request,
            reading if isinstance(reading, Reading) else Reading(reading),
            self._connection.call_timeout(options.get("timeout")),
            self._connection.call_metadata(options.get("metadata")),
        )


def _shared(options: CallOptions) -> dict[str, Any]:
    """Sampling and options as fields of a request; neither is set if nothing in it is."""
    handling = _handling(options, CallOptions)
    return {"sampling": _sampling(options), "options": handling}


def _handling(options: HandlingOptions, known: type) -> common_pb2.RequestOptions | None:
    """None if nothing in it is set. Raises TypeError for an option that ``known`` doesn't have."""
    unknown = options.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")
    given = {n: v for n, v in options.items() if n in _HANDLING and v is not None}
    if "priority" in given:
        given["priority"] = _choice("priority", given["priority"], _PRIORITIES)
    return _build(common_pb2.RequestOptions, **given) if given else None


def _sampling(values: Mapping[str, Any]) -> common_pb2.Sampling | None:
    """None if nothing in it is set."""
    given = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    return _build(common_pb2.Sampling, **given) if given else None


def _task(key: str, task: Task) -> pb.AnalyzeTask:
    """Raises InvalidRequestError."""
    sampling = _sampling({name: getattr(task, name) for name in _SAMPLING})
    if isinstance(task, CaptionTask):
        length = _choice("length", task.length, _CAPTION_LENGTHS)
        caption = _build(pb.CaptionTask, length=length, sampling=sampling)
        return _build(pb.AnalyzeTask, key=key, caption=caption)
    if isinstance(task, DetectTask):
        detect = _build(
            pb.DetectTask, object=task.object, max_objects=task.max_objects, sampling=sampling
        )
        return _build(pb.AnalyzeTask, key=key, detect=detect)
    refs = to_spatial_refs(task.spatial_refs)
    if isinstance(task, QueryTask):
        query = _build(
            pb.QueryTask,
            question=task.question,
            reasoning=task.reasoning,
            spatial_refs=refs,
            sampling=sampling,
        )
        return _build(pb.AnalyzeTask, key=key, query=query)
    if isinstance(task, PointTask):
        point = _build(
            pb.PointTask,
            object=task.object,
            max_objects=task.max_objects,
            spatial_refs=refs,
            sampling=sampling,
        )
        return _build(pb.AnalyzeTask, key=key, point=point)
    segment = _build(
        pb.SegmentTask,
        object=task.object,
        spatial_refs=refs,
        mask_format=_choice("mask", task.mask, _MASK_FORMATS),
        sampling=sampling,
    )
    return _build(pb.AnalyzeTask, key=key, segment=segment)


def _choice(name: str, value: object, choices: Mapping[str, _E]) -> _E:
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    return choices[value]


def _build(kind: Callable[..., _Q], **values: Any) -> _Q:
    """Each field that protobuf refuses (a wrong type, a number out of the field's range) is named in the error."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                raise InvalidRequestError(f"{name}: {error}") from error
        raise InvalidRequestError(str(error)) from error
