"""From the arguments of a method to a prepared call: the same for both clients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, cast

from google.protobuf.message import Message

from .._pb.kestrel.client.internal import wire_pb2
from .._pb.kestrel.v1 import common_pb2
from .._pb.kestrel.v1 import image_service_pb2 as image_pb
from .._pb.kestrel.v1 import model_service_pb2 as model_pb
from .._pb.kestrel.v1 import vision_service_pb2 as pb
from .._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from .._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from .._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ..connection import HEALTH_CHECK_METHOD, Connection, Metadata
from ..errors import InvalidRequestError
from ..images.images import ImageHandle, ImageInput, loaded, to_image
from ..images.known import KnownImages, images_of
from ..images.stored import Put, image_id_of, prepare_put, prepare_stored, read_handle
from ..values.constraint import Constraint, to_constraint
from ..values.description import (
    Model,
    ServerInfo,
    ServerLoad,
    read_load,
    read_model,
    read_server_info,
)
from ..values.embeddings import EmbeddingDtype, EmbedResult, EmbedStream, Pooling, embed_result
from ..values.geometry import Box, to_region, to_spatial_refs, to_tiles
from ..values.results.base import Result
from ..values.results.named_skill import SkillResult, skill_result
from ..values.struct_values import to_struct
from ..values.tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
    TaskOf,
    Tasks,
    analyze_result,
    keyed,
    read_result,
    read_several_event,
    read_task_event,
    several_result,
    to_turns,
)
from .frames import FrameCall
from .prepared import Method, Prepared, prepare
from .restoring import Restoring
from .streams import Reading

CaptionLength: TypeAlias = Literal["short", "normal", "long"]
Priority: TypeAlias = Literal["low", "normal", "high"]
LateFrames: TypeAlias = Literal["keep", "overview"]


class HandlingOptions(TypedDict, total=False):
    """How a call is handled. The server has a default for each option that is omitted or None."""

    model: str | None
    """Name of the model that must answer."""
    adapter: str | None
    """Name of the adapter, a fine-tune of the model, to apply."""
    request_id: str | None
    """Your name for the request: 1 to 128 visible ASCII characters."""
    priority: Priority | None
    """Order in which waiting requests are started."""
    cache_salt: str | None
    """The server reuses computation only among calls with the same salt; at most 128 bytes of UTF-8."""
    background: str | None
    """Background colour for a transparent image, like "#ffffff"; without it the server drops the alpha channel."""
    region: Box | Sequence[float] | None
    """The part of the image that the model sees: a Box, or x_min, y_min, x_max and y_max. Results and spatial
    references have coordinates of the whole image. Further images of a query are seen whole."""
    timeout: float | None
    """Seconds for the whole call; default: the client's. The server drops a request that still waits at its end."""
    metadata: Metadata | None
    """Sent with the call, after the client's own."""
    session: str | None
    """With several servers: calls with the same name go to the same server, whatever their images are. 1 to 128 visible
    ASCII characters; default: calls about the same image go to the same server."""


class CallOptions(HandlingOptions, total=False):
    """Options of every skill. The server has a default for each option that is omitted or None."""

    temperature: float | None
    """0 is greedy; in [0, 100]."""
    top_p: float | None
    """In (0, 1]."""
    top_k: int | None
    """At least 0; 0 keeps all tokens."""
    max_tokens: int | None
    """Largest number of tokens to generate, at least 1. Reasoning and answer each have this limit. A point takes 2
    tokens and a box 3; an incomplete object is dropped."""
    max_reasoning_tokens: int | None
    """For ``query`` with reasoning: largest number of tokens of the reasoning, at least 1; ``max_tokens`` then limits
    the answer alone. ``result.reasoning.finish_reason`` tells whether the reasoning was cut."""
    seed: int | None
    """In [0, 2^64): the same seed and request give the same result."""
    stop: str | Sequence[str] | None
    """For ``query`` and ``caption``: the text ends before the first of these texts; at most 16, each of at most 256
    bytes of UTF-8. One string is one text. In reasoning they are ordinary text."""
    logprobs: bool | None
    """For ``query`` and ``caption``: whether the result has the log-probability of each token (``result.logprobs``)."""
    top_logprobs: int | None
    """With ``logprobs``: how many of the likeliest tokens the result has at the place of each token, at most 20
    (``TokenLogprob.top``)."""
    constraint: Constraint | None
    """For ``query`` and ``caption``: what the text must match."""
    min_p: float | None
    """In [0, 1]: tokens whose probability is below this part of the largest one are not sampled."""
    repetition_penalty: float | None
    """For ``query`` and ``caption``, as the options below. In [0.01, 10]; above 1 the model repeats less of the prompt
    and of the text so far."""
    presence_penalty: float | None
    """In [-2, 2]: subtracted from the logits of all tokens of the text so far."""
    frequency_penalty: float | None
    """In [-2, 2]: subtracted from the logit of a token for each time that it is in the text so far."""
    logit_bias: Mapping[int, float] | None
    """Numbers in [-100, 100] to add to the logits of at most 300 tokens, by id."""


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
    "polygons": pb.MASK_FORMAT_POLYGONS,
}
_LATE_FRAMES = {"keep": pb.LATE_FRAMES_KEEP, "overview": pb.LATE_FRAMES_OVERVIEW}
_POOLINGS = {"mean": pb.EMBEDDING_POOLING_MEAN, "none": pb.EMBEDDING_POOLING_NONE}
_EMBEDDING_DTYPES = {
    "float32": pb.EMBEDDING_DTYPE_FLOAT32,
    "float16": pb.EMBEDDING_DTYPE_FLOAT16,
}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_reasoning_tokens",
    "seed",
    "stop",
    "logprobs",
    "top_logprobs",
    "constraint",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
_HANDLING = ("model", "adapter", "request_id", "priority", "cache_salt")

_Q = TypeVar("_Q", bound=Message)
_T = TypeVar("_T", bound=Result)
_E = TypeVar("_E")


class _HealthStub:
    """A stub of grpc.health.v1.Health. The generated one is in a package that the client does without."""

    def __init__(self, channel: Any) -> None:
        self.Check = channel.unary_unary(
            HEALTH_CHECK_METHOD,
            request_serializer=wire_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=wire_pb2.HealthCheckResponse.FromString,
        )


STUBS = (VisionServiceStub, ImageServiceStub, ModelServiceStub, _HealthStub)
"""Those that the calls of Requests need."""


def _vision(unary: str, stream: str, request: type[Message]) -> Method:
    return Method(VisionServiceStub, unary, stream, request, repeatable=True)


_ANALYZE = _vision("Analyze", "StreamAnalyze", pb.StreamAnalyzeRequest)
_RUN_SKILL = _vision("RunSkill", "StreamSkill", pb.StreamSkillRequest)
_EMBED = _vision("Embed", "StreamEmbed", pb.StreamEmbedRequest)


class _Skill(NamedTuple):
    """A skill of the model: as a method of its own, and as one of the tasks of Analyze."""

    method: Method
    request: Callable[..., Message]
    task: Callable[..., Message]
    field: str
    """The field of AnalyzeTask that holds ``task``."""


_QUERY = _Skill(
    _vision("Query", "StreamQuery", pb.StreamQueryRequest), pb.QueryRequest, pb.QueryTask, "query"
)
_CAPTION = _Skill(
    _vision("Caption", "StreamCaption", pb.StreamCaptionRequest),
    pb.CaptionRequest,
    pb.CaptionTask,
    "caption",
)
_POINT = _Skill(
    _vision("Point", "StreamPoint", pb.StreamPointRequest), pb.PointRequest, pb.PointTask, "point"
)
_DETECT = _Skill(
    _vision("Detect", "StreamDetect", pb.StreamDetectRequest),
    pb.DetectRequest,
    pb.DetectTask,
    "detect",
)
_SEGMENT = _Skill(
    _vision("Segment", "StreamSegment", pb.StreamSegmentRequest),
    pb.SegmentRequest,
    pb.SegmentTask,
    "segment",
)


class Requests:
    """Prepares the calls of one connection. All methods raise InvalidRequestError for arguments that can't be sent.

    The methods that take an image read files and fetch http(s) addresses; the others don't block.
    """

    def __init__(self, connection: Connection, known: KnownImages) -> None:
        self._connection, self._known = connection, known

    def task(
        self,
        image: ImageInput | None,
        task: TaskOf[_T],
        options: CallOptions | HandlingOptions,
        known: type = CallOptions,
        *,
        num_samples: int | None = None,
    ) -> Prepared[_T]:
        """One task as a call of its own. ``num_samples``: for a QueryTask or a CaptionTask.

        The sampling of ``task`` takes precedence over that of ``options``. Raises TypeError for an option that is not
        in ``known``. Only a QueryTask takes None as its image.
        """
        given = cast(CallOptions, options)
        if isinstance(task, QueryTask) and task.images:
            if isinstance(task.images, (str, bytes)):
                raise InvalidRequestError("images: is one image, needs a sequence of images")
            more = tuple(map(self._loaded, task.images))
            task = cast(TaskOf[_T], replace(task, images=more))
        skill, fields = _described("task", task, self._to_image(given))
        sampling = {n: getattr(task, n) for n in _SAMPLING if getattr(task, n) is not None}
        if isinstance(task, QueryTask) and task.images:
            fields["images"] = [self._image(each, given) for each in task.images]
        if image is not None or not isinstance(task, QueryTask):
            image = self._loaded(cast(ImageInput, image))
            fields["image"] = self._seen(image, given)
        elif given.get("region") is not None:
            raise InvalidRequestError("region: needs an image")
        if num_samples is not None:
            fields["num_samples"] = num_samples
        request = _build(
            skill.request,
            **fields,
            sampling=_sampling({**given, **sampling}),
            options=_handling(given, known),
        )
        return self._prepared(
            skill.method,
            request,
            lambda response: cast(_T, read_result(cast(Task, task), response, image)),
            given,
            image,
            *(task.images if isinstance(task, QueryTask) else ()),
        )

    def analyze(
        self, image: ImageInput, tasks: Tasks, options: HandlingOptions
    ) -> Prepared[AnalyzeResult]:
        image = self._loaded(image)
        by_key = keyed(tasks)
        request = _build(
            pb.AnalyzeRequest,
            image=self._seen(image, options),
            tasks=[_task(key, task) for key, task in by_key.items()],
            options=_handling(options, HandlingOptions),
        )
        reading = Reading(
            lambda response: analyze_result(response, by_key, image),
            lambda message, payload: read_task_event(message, payload, by_key, image),
        )
        return self._prepared(_ANALYZE, request, reading, options, image)

    def frames(
        self,
        tasks: Tasks,
        latency_budget_ms: int | None,
        late: LateFrames,
        max_in_flight: int | None,
        reconnect: bool,
        options: HandlingOptions,
    ) -> FrameCall:
        by_key = keyed(tasks)
        config = _build(
            pb.FramesConfig,
            tasks=[_task(key, task) for key, task in by_key.items()],
            latency_budget_ms=latency_budget_ms,
            late=_choice("late", late, _LATE_FRAMES),
            max_in_flight=max_in_flight,
            options=_handling(options, HandlingOptions),
        )
        timeout, metadata = options.get("timeout"), options.get("metadata")
        handling = {
            "timeout": None if timeout is None else self._connection.call_timeout(timeout),
            "metadata": self._connection.call_metadata(metadata, _session(options.get("session"))),
        }
        to_image = self._to_image(options)
        return FrameCall(
            config, by_key, lambda image: to_image(self._loaded(image)), handling, reconnect
        )

    def several(
        self,
        image: ImageInput,
        task: PointTask | DetectTask,
        objects: Sequence[str],
        options: CallOptions,
    ) -> Prepared[AnalyzeResult]:
        """Several objects in one call, each with the other values of ``task``."""
        if task.object:
            raise InvalidRequestError("objects: give object or objects, not both")
        if isinstance(objects, str) or not all(isinstance(name, str) for name in objects):
            raise InvalidRequestError(f"objects: {objects!r} is not a sequence of names")
        if not objects:
            raise InvalidRequestError("objects: has no name")
        image = self._loaded(image)
        skill, fields = _described("task", task, self._to_image(options))
        request = _build(
            skill.request,
            **fields,
            image=self._seen(image, options),
            objects=list(objects),
            sampling=_sampling(options),
            options=_handling(options, CallOptions),
        )
        tasks: dict[str, Task] = {name: replace(task, object=name) for name in objects}
        reading = Reading(
            lambda response: several_result(response, tasks, image),
            lambda message, payload: read_several_event(message, payload, tasks, image),
        )
        return self._prepared(skill.method, request, reading, options, image)

    def run_skill(
        self,
        skill: str,
        image: ImageInput | None,
        arguments: Mapping[str, Any] | None,
        settings: Mapping[str, Any] | None,
        options: CallOptions,
    ) -> Prepared[SkillResult]:
        image = None if image is None else self._loaded(image)
        request = _build(
            pb.RunSkillRequest,
            skill=skill,
            image=None if image is None else self._seen(image, options),
            arguments=to_struct("arguments", arguments),
            settings=to_struct("settings", settings),
            sampling=_sampling(options),
            options=_handling(options, CallOptions),
        )
        return self._prepared(
            _RUN_SKILL,
            request,
            lambda response: skill_result(response, image, skill),
            options,
            image,
        )

    def embed(
        self,
        image: ImageInput,
        whole_image: bool,
        crops: bool,
        pooling: Pooling,
        dtype: EmbeddingDtype,
        options: HandlingOptions,
        *,
        streamed: bool = False,
    ) -> Prepared[EmbedResult]:
        image = self._loaded(image)
        request = _build(
            pb.EmbedRequest,
            image=self._seen(image, options),
            whole_image=whole_image,
            crops=crops,
            pooling=_choice("pooling", pooling, _POOLINGS),
            dtype=_choice("dtype", dtype, _EMBEDDING_DTYPES),
            options=_handling(options, HandlingOptions),
        )
        reading = Reading(embed_result)
        if streamed:
            stream = EmbedStream()
            reading = Reading(stream.result, stream.event)
        return self._prepared(_EMBED, request, reading, options, image)

    def put_image(
        self,
        image: ImageInput,
        timeout: float | None,
        metadata: Metadata | None,
        session: str | None = None,
    ) -> Prepared[ImageHandle]:
        put = prepare_put(image, self._connection.max_message_bytes)
        return self._put(put, timeout, metadata, _session(session))

    def _put(
        self, put: Put, timeout: float | None, metadata: Metadata | None, about: str
    ) -> Prepared[ImageHandle]:
        """``about``: selects the server; empty for the image itself."""
        image = common_pb2.Image(encoded=put.data) if put.data else put.request.image
        digest = self._known.key(image)

        def read(response: Any) -> ImageHandle:
            self._known.learn(response.image.image_id, image, digest)
            return read_handle(response.image, put.source)

        return prepare(
            self._connection,
            Method(ImageServiceStub, "UploadImage" if put.data else "PutImage", repeatable=True),
            put.pieces() if put.data else put.request,
            read,
            timeout=timeout,
            metadata=metadata,
            about=about or digest,
        )

    def delete_image(
        self,
        image: ImageHandle | str,
        timeout: float | None,
        metadata: Metadata | None,
        session: str | None = None,
    ) -> Prepared[bool]:
        given = image_id_of(image)
        current = self._known.current_id(given)
        about = _session(session) or self._known.key(common_pb2.Image(image_id=given))
        self._known.forget(given)
        return prepare(
            self._connection,
            Method(ImageServiceStub, "DeleteImage", repeatable=True),
            image_pb.DeleteImageRequest(image_id=current),
            lambda response: bool(response.existed),
            timeout=timeout,
            metadata=metadata,
            about=about,
        )

    def list_models(self, timeout: float | None) -> Prepared[tuple[Model, ...]]:
        def read(response: model_pb.ListModelsResponse) -> tuple[Model, ...]:
            return tuple(map(read_model, response.models))

        return self._model("ListModels", model_pb.ListModelsRequest(), read, timeout)

    def get_model(self, name: str | None, timeout: float | None) -> Prepared[Model]:
        request = model_pb.GetModelRequest(name=name)
        return self._model("GetModel", request, lambda r: read_model(r.model), timeout)

    def server_info(self, timeout: float | None) -> Prepared[ServerInfo]:
        request = model_pb.GetServerInfoRequest()
        return self._model("GetServerInfo", request, read_server_info, timeout)

    def server_load(self, timeout: float | None) -> Prepared[ServerLoad]:
        return self._model("GetLoad", model_pb.GetLoadRequest(), read_load, timeout)

    def is_serving(self, service: str, timeout: float) -> Prepared[bool]:
        """A health check, which waits for a connection. It gives False for a server that does not serve yet."""
        return prepare(
            self._connection,
            Method(_HealthStub, "Check"),
            wire_pb2.HealthCheckRequest(service=service),
            lambda response: bool(response.status == wire_pb2.HealthCheckResponse.SERVING),
            timeout=timeout,
            wait_for_ready=True,
        )

    def _model(
        self, name: str, request: Message, read: Callable[[Any], _E], timeout: float | None
    ) -> Prepared[_E]:
        method = Method(ModelServiceStub, name, repeatable=True)
        return prepare(self._connection, method, request, read, timeout=timeout)

    def _prepared(
        self,
        method: Method,
        request: Message,
        read: Reading[_E] | Callable[[Any], _E],
        options: HandlingOptions,
        *sources: ImageInput | None,
    ) -> Prepared[_E]:
        """Completes a call about images. ``sources``: those that the caller gave, or their handles."""
        images = list(images_of(request))
        digest = self._known.key(images[0]) if images else ""
        about = _session(options.get("session")) or digest
        reading = read if isinstance(read, Reading) else Reading(read)

        def result(response: Any) -> _E:
            ids = [seen.image_id for seen in getattr(response, "images", ())]
            stored = zip(images, ids or [getattr(response, "image_id", "")], strict=False)
            for place, (image, image_id) in enumerate(stored):
                self._known.learn(image_id, image, digest if place == 0 else "")
            return reading.result(response)

        metadata = options.get("metadata")
        held = {
            source.image_id: source.source
            for source in sources
            if isinstance(source, ImageHandle) and source.source is not None
        }

        def put_again(image: common_pb2.Image, timeout: float | None) -> Prepared[ImageHandle]:
            put = prepare_stored(image, self._connection.max_message_bytes)
            return self._put(put, timeout, metadata, about)

        restoring = None
        if any(image.image_id for image in images):
            restoring = Restoring(self._known, request, held, put_again)
        return prepare(
            self._connection,
            method,
            request,
            Reading(result, reading.event) if images else reading,
            timeout=options.get("timeout"),
            metadata=metadata,
            about=about,
            restoring=restoring,
        )

    def _loaded(self, image: ImageInput) -> ImageInput:
        return loaded(image, self._connection.max_message_bytes)

    def _to_image(self, options: HandlingOptions) -> Callable[[ImageInput], common_pb2.Image]:
        return lambda image: self._image(image, options)

    def _image(self, image: ImageInput, options: HandlingOptions) -> common_pb2.Image:
        message = to_image(image, self._connection.max_message_bytes)
        if (background := options.get("background")) is not None:
            if not isinstance(background, str):
                raise InvalidRequestError(f"background={background!r}: must be like '#ffffff'")
            message.background = background
        return message

    def _seen(self, image: ImageInput, options: HandlingOptions) -> common_pb2.Image:
        """The image that the call is about, with its region."""
        message = self._image(image, options)
        if (region := options.get("region")) is not None:
            message.region.CopyFrom(to_region(region))
        return message


def _session(name: str | None) -> str:
    """The value of IMAGE_HEADER for a session; empty for None. Raises InvalidRequestError."""
    if name is None:
        return ""
    if not isinstance(name, str) or not re.fullmatch(r"[!-~]{1,128}", name):
        raise InvalidRequestError(f"session={name!r}: must be 1 to 128 visible ASCII characters")
    return name


def _described(
    name: str, task: TaskOf[Any], to_image: Callable[[ImageInput], common_pb2.Image]
) -> tuple[_Skill, dict[str, Any]]:
    """The skill of a task, and the fields that the task's message and the request of the skill's method share.
    ``to_image``: makes the message of an image.

    Raises InvalidRequestError, naming the argument ``name``, for a value that is not a task.
    """
    match task:
        case QueryTask():
            refs = to_spatial_refs(task.spatial_refs)
            return _QUERY, {
                "question": task.question,
                "reasoning": task.reasoning,
                "spatial_refs": refs,
                "history": to_turns(task.history, to_image),
                "system": task.system or None,
            }
        case CaptionTask():
            return _CAPTION, {"length": _choice("length", task.length, _CAPTION_LENGTHS)}
        case PointTask():
            refs = to_spatial_refs(task.spatial_refs)
            return _POINT, {
                "object": task.object,
                "max_objects": task.max_objects,
                "spatial_refs": refs,
                "min_score": task.min_score,
                "tiles": to_tiles(task.tiles),
            }
        case DetectTask():
            return _DETECT, {
                "object": task.object,
                "max_objects": task.max_objects,
                "min_score": task.min_score,
                "max_overlap": task.max_overlap,
                "tiles": to_tiles(task.tiles),
            }
        case SegmentTask():
            return _SEGMENT, {
                "object": task.object,
                "spatial_refs": to_spatial_refs(task.spatial_refs),
                "mask_format": _choice("mask", task.mask, _MASK_FORMATS),
                "min_score": task.min_score,
                "refine": task.refine,
            }
    raise InvalidRequestError(f"{name}: {task!r} is not a task, like QueryTask")


def _task(key: str, task: Task) -> pb.AnalyzeTask:
    """Raises InvalidRequestError."""

    def refuse(image: ImageInput) -> common_pb2.Image:
        raise InvalidRequestError(f"tasks[{key!r}]: all tasks are about one image; use query")

    if isinstance(task, QueryTask) and task.images:
        refuse(task.images[0])
    skill, fields = _described(f"tasks[{key!r}]", task, refuse)
    if fields.pop("tiles", None) is not None:
        raise InvalidRequestError(f"tasks[{key!r}]: tiles are for point and detect alone")
    sampling = _sampling({name: getattr(task, name) for name in _SAMPLING})
    message = _build(skill.task, **fields, sampling=sampling)
    return _build(pb.AnalyzeTask, key=key, **{skill.field: message})


def _handling(options: HandlingOptions, known: type) -> common_pb2.RequestOptions | None:
    """None if no option is set. Raises TypeError for an option that is not in ``known``."""
    unknown = options.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")
    given = {n: v for n, v in options.items() if n in _HANDLING and v is not None}
    if "priority" in given:
        given["priority"] = _choice("priority", given["priority"], _PRIORITIES)
    return _build(common_pb2.RequestOptions, **given) if given else None


def _sampling(values: Mapping[str, Any]) -> common_pb2.Sampling | None:
    """None if no sampling option is set."""
    given = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "constraint" in given:
        given["constraint"] = to_constraint(given["constraint"])
    if "logit_bias" in given:
        given["logit_bias"] = _to_bias(given["logit_bias"])
    return _build(common_pb2.Sampling, **given) if given else None


def _to_bias(biases: object) -> list[common_pb2.LogitBias]:
    """Raises InvalidRequestError."""
    if not isinstance(biases, Mapping):
        raise InvalidRequestError(f"logit_bias: {biases!r} is not a mapping from ids to numbers")
    try:
        return [common_pb2.LogitBias(id=token, bias=bias) for token, bias in biases.items()]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"logit_bias: {error}") from error


def _choice(name: str, value: object, choices: Mapping[str, _E]) -> _E:
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    return choices[value]


def _build(kind: Callable[..., _Q], **values: Any) -> _Q:
    """Builds a message. Raises InvalidRequestError, naming the field whose type or range protobuf refuses."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                limit = _limit(kind, name, value)
                raise InvalidRequestError(f"{name}: {limit or error}") from error
        raise InvalidRequestError(str(error)) from error


def _limit(kind: Any, name: str, value: object) -> str:
    """What a whole number in a field of the message ``kind`` must be; empty if ``value`` is no whole number."""
    field = kind.DESCRIPTOR.fields_by_name[name]
    highest = {field.CPPTYPE_UINT32: 2**32 - 1, field.CPPTYPE_UINT64: 2**64 - 1}.get(field.cpp_type)
    if highest is None or not isinstance(value, int):
        return ""
    return f"{value} is not a whole number from 0 to {highest}"
