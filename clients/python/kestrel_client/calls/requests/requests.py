"""From the arguments of a method to a prepared call: the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ..._pb.kestrel.v1 import common_pb2
from ..._pb.kestrel.v1 import vision_service_pb2 as pb
from ..._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from ..._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from ..._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ...connection import Connection
from ...errors import InvalidRequestError
from ...geometry import to_region
from ...images.images import ImageHandle, ImageInput, loaded, to_image
from ...images.known import KnownImages, images_of
from ...values.embeddings import EmbeddingDtype, EmbedResult, EmbedStream, Pooling, embed_result
from ...values.results.base import Result
from ...values.results.named_skill import SkillResult, skill_result
from ...values.struct_values import to_struct
from ...values.tasks import (
    AnalyzeResult,
    DetectTask,
    PointTask,
    QueryTask,
    Task,
    TaskOf,
    Tasks,
    analyze_result,
    keyed,
    read_result,
    read_several_event,
    read_task_event,
    several_result,
)
from ..frames import FrameCall
from ..prepared import Method, Prepared, prepare
from ..restoring import Restoring
from ..streams import Reading
from .building import build, choice
from .images import ImageRequests
from .options import (
    SAMPLING,
    CallOptions,
    HandlingOptions,
    LateFrames,
    checked_session,
    to_handling,
    to_sampling,
)
from .server import HealthStub, ServerRequests
from .tasks import described, to_task, vision_method

_LATE_FRAMES = {"keep": pb.LATE_FRAMES_KEEP, "overview": pb.LATE_FRAMES_OVERVIEW}
_POOLINGS = {"mean": pb.EMBEDDING_POOLING_MEAN, "none": pb.EMBEDDING_POOLING_NONE}
_EMBEDDING_DTYPES = {
    "float32": pb.EMBEDDING_DTYPE_FLOAT32,
    "float16": pb.EMBEDDING_DTYPE_FLOAT16,
}

_E = TypeVar("_E")
_T = TypeVar("_T", bound=Result)

STUBS = (VisionServiceStub, ImageServiceStub, ModelServiceStub, HealthStub)
"""Those that the calls of Requests need."""

_ANALYZE = vision_method("Analyze", "StreamAnalyze")
_RUN_SKILL = vision_method("RunSkill", "StreamSkill")
_EMBED = vision_method("Embed", "StreamEmbed")


class Requests:
    """Prepares the calls of one connection. All methods raise InvalidRequestError for arguments that can't be sent.

    The methods that take an image read files and fetch http(s) addresses; the others don't block.
    """

    def __init__(self, connection: Connection, known: KnownImages) -> None:
        self._connection, self._known = connection, known
        self.images = ImageRequests(connection, known)
        self.server = ServerRequests(connection)

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
        skill, fields = described("task", task, self._to_image(given))
        sampling = {n: getattr(task, n) for n in SAMPLING if getattr(task, n) is not None}
        if isinstance(task, QueryTask) and task.images:
            fields["images"] = [self._image(each, given) for each in task.images]
        if image is not None or not isinstance(task, QueryTask):
            image = self._loaded(cast(ImageInput, image))
            fields["image"] = self._seen(image, given)
        elif given.get("region") is not None:
            raise InvalidRequestError("region: needs an image")
        if num_samples is not None:
            fields["num_samples"] = num_samples
        request = build(
            skill.request,
            **fields,
            sampling=to_sampling({**given, **sampling}),
            options=to_handling(given, known),
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
        request = build(
            pb.AnalyzeRequest,
            image=self._seen(image, options),
            tasks=[to_task(key, task) for key, task in by_key.items()],
            options=to_handling(options, HandlingOptions),
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
        config = build(
            pb.FramesConfig,
            tasks=[to_task(key, task) for key, task in by_key.items()],
            latency_budget_ms=latency_budget_ms,
            late=choice("late", late, _LATE_FRAMES),
            max_in_flight=max_in_flight,
            options=to_handling(options, HandlingOptions),
        )
        timeout, metadata = options.get("timeout"), options.get("metadata")
        handling = {
            "timeout": None if timeout is None else self._connection.call_timeout(timeout),
            "metadata": self._connection.call_metadata(
                metadata, checked_session(options.get("session"))
            ),
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
        skill, fields = described("task", task, self._to_image(options))
        request = build(
            skill.request,
            **fields,
            image=self._seen(image, options),
            objects=list(objects),
            sampling=to_sampling(options),
            options=to_handling(options, CallOptions),
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
        request = build(
            pb.RunSkillRequest,
            skill=skill,
            image=None if image is None else self._seen(image, options),
            arguments=to_struct("arguments", arguments),
            settings=to_struct("settings", settings),
            sampling=to_sampling(options),
            options=to_handling(options, CallOptions),
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
        request = build(
            pb.EmbedRequest,
            image=self._seen(image, options),
            whole_image=whole_image,
            crops=crops,
            pooling=choice("pooling", pooling, _POOLINGS),
            dtype=choice("dtype", dtype, _EMBEDDING_DTYPES),
            options=to_handling(options, HandlingOptions),
        )
        reading = Reading(embed_result)
        if streamed:
            stream = EmbedStream()
            reading = Reading(stream.result, stream.event)
        return self._prepared(_EMBED, request, reading, options, image)

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
        about = checked_session(options.get("session")) or digest
        reading = read if isinstance(read, Reading) else Reading(read)

        def result(response: Any) -> _E:
            ids = [seen.image_id for seen in getattr(response, "images", ())]
            stored = zip(images, ids or [getattr(response, "image_id", "")], strict=False)
            for place, (image, image_id) in enumerate(stored):
                self._known.learn(image_id, image, digest if place == 0 else "")
                if restoring is not None and image_id:
                    restoring.answered(image, image_id)
            return reading.result(response)

        metadata = options.get("metadata")
        held = {
            source.image_id: source.source
            for source in sources
            if isinstance(source, ImageHandle) and source.source is not None
        }

        def put_again(image: common_pb2.Image, timeout: float | None) -> Prepared[ImageHandle]:
            return self.images.put_again(image, timeout, metadata, about)

        restoring = None
        if any(image.image_id for image in images):
            restoring = Restoring(
                self._known, request, held, put_again, self._connection.max_message_bytes
            )
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
