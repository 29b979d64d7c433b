"""From the arguments of a method to a prepared call: the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ..._pb.kestrel.v1 import batch_service_pb2 as batch_pb
from ..._pb.kestrel.v1 import common_pb2
from ..._pb.kestrel.v1 import vision_service_pb2 as pb
from ..._pb.kestrel.v1.batch_service_pb2_grpc import BatchServiceStub
from ..._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from ..._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from ..._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ...connection import Connection
from ...errors import InvalidRequestError
from ...geometry import to_region
from ...images.image_forms import ImageHandle, ImageInput, Pixels, loaded, to_image
from ...images.known import KnownImages
from ...images.request_images import request_images
from ...values.counting import TokenCount, token_count
from ...values.embeddings import EmbeddingDtype, EmbedResult, EmbedStream, Pooling, embed_result
from ...values.reading import words
from ...values.results.base import Result
from ...values.tasks import (
    AnalyzeResult,
    QueryTask,
    SkillTask,
    Task,
    TaskOf,
    Tasks,
    analyze_result,
    keyed,
    read_result,
    read_task_event,
    to_turns,
)
from ..frame_messages import FramesStub
from ..frames import FrameCall
from ..health import HealthStub
from ..prepared_call import Method, PreparedCall, prepare_call
from ..restoring import Restoring
from ..streams import Reading
from .building import build, choice
from .options import HandlingOptions, LateFrames, QueryOptions, checked_session, to_handling
from .stored_images import ImageRequests
from .tasks import kind_of, to_message, to_task, vision_method

_LATE_FRAMES = words(pb.LateFrames)
_POOLINGS = words(pb.EmbeddingPooling)
_PARTS = {
    (True, False): pb.EMBEDDING_PARTS_IMAGE,
    (False, True): pb.EMBEDDING_PARTS_CROPS,
    (True, True): pb.EMBEDDING_PARTS_IMAGE_AND_CROPS,
}
_EMBEDDING_DTYPES = words(pb.EmbeddingDtype)

_E = TypeVar("_E")
_T = TypeVar("_T", bound=Result)

STUBS = (
    *(VisionServiceStub, FramesStub, ImageServiceStub, ModelServiceStub, BatchServiceStub),
    HealthStub,
)
"""Those that the calls of Requests need."""

_ANALYZE = vision_method("Analyze")
_EMBED = vision_method("Embed")
_COUNT = Method(VisionServiceStub, "CountTokens", repeatable=True)


class Requests:
    """Prepares the calls of one connection. All methods raise InvalidRequestError for arguments that can't be sent.

    The methods that take an image read files and fetch http(s) addresses; the others don't block.
    """

    def __init__(self, connection: Connection, known: KnownImages) -> None:
        self._connection, self._known = connection, known
        self.images = ImageRequests(connection, known)

    def skill(
        self,
        image: ImageInput | None,
        kind: type[TaskOf[_T]],
        argument: object,
        options: HandlingOptions,
        **own: object,
    ) -> PreparedCall[_T]:
        """A call of a skill's own method. ``argument``: the first field of its task. ``options`` and ``own`` have the
        others."""
        given = cast(Mapping[str, object], options)
        own |= {each.name: given[each.name] for each in fields(kind) if each.name in given}
        return self.task(image, cast(Any, kind)(argument, **own), options)

    def task(
        self,
        image: ImageInput | None,
        task: TaskOf[_T],
        options: HandlingOptions,
        known: type | None = None,
    ) -> PreparedCall[_T]:
        """One task as a call of its own. The options of ``task`` take precedence over ``options``.

        Raises TypeError for an option that is not in ``known``, by default those of the task's kind. Only a QueryTask
        and a SkillTask take None as their image.
        """
        skill = kind_of("task", task)
        handling = to_handling(options, known or skill.options)
        sources: tuple[ImageInput, ...] = ()
        if isinstance(task, QueryTask):
            start = task.answer_start or cast(QueryOptions, options).get("answer_start") or ""
            question = self._with_images(replace(task, answer_start=start))
            sources, task = tuple(question.images), question  # type: ignore[assignment]
        message = to_message(task, options)
        if image is not None or not isinstance(task, (QueryTask, SkillTask)):
            image = self._loaded(cast(ImageInput, image))
        elif options.get("region") is not None:
            raise InvalidRequestError("region: needs an image")
        seen = None if image is None else self._seen(image, options)
        fields: dict[str, Any] = {"image": seen}
        if isinstance(task, QueryTask):
            fields = {"images": self._images(seen, task, cast(pb.QueryTask, message), options)}
        request = build(skill.request, **fields, options=handling, **{skill.field: message})
        return self._prepared(
            skill.method,
            request,
            lambda response: cast(_T, read_result(cast(Task, task), response, image)),
            options,
            image,
            *sources,
        )

    def _with_images(self, task: QueryTask) -> QueryTask:
        """The task, whose images and history can be read several times."""
        if isinstance(task.images, (str, bytes)):
            raise InvalidRequestError("images: is one image, needs a sequence of images")
        images = tuple(map(self._loaded, task.images))
        return replace(task, images=images, history=tuple(task.history))

    def _images(
        self,
        first: common_pb2.Image | None,
        task: QueryTask,
        message: pb.QueryTask,
        options: HandlingOptions,
    ) -> list[common_pb2.Image]:
        """The images of a question in the order of the prompt; counts in ``message`` those of each turn."""
        turns = to_turns(task.history)
        images = [] if first is None else [first]
        if task.images or any(turn.images for turn in turns):
            for number, turn in enumerate(turns):
                count = len(turn.images) + (len(images) if number == 0 else 0)
                message.history[number].num_images = count
        for shown in (*(turn.images for turn in turns), task.images):
            images += [self._image(each, options) for each in shown]
        return images

    def analyze(
        self, image: ImageInput, tasks: Tasks, options: HandlingOptions
    ) -> PreparedCall[AnalyzeResult]:
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

    def count(
        self, image: ImageInput | None, tasks: Task | Tasks, options: HandlingOptions
    ) -> PreparedCall[TokenCount]:
        """Counts one task as a call of its own, several as those of ``analyze``."""
        by_key = keyed([tasks] if isinstance(tasks, Task) else tasks)
        image = None if image is None else self._loaded(image)
        seen = None if image is None else self._seen(image, options)
        images = [] if seen is None else [seen]
        only = next(iter(by_key.values())) if len(by_key) == 1 else None
        if isinstance(only, QueryTask):
            only = self._with_images(only)
            message = cast(pb.QueryTask, to_message(only, {}))
            images = self._images(seen, only, message, options)
            messages = [build(pb.Task, key=next(iter(by_key)), query=message)]
        else:
            messages = [to_task(key, task) for key, task in by_key.items()]
        request = build(
            pb.CountTokensRequest,
            images=images,
            tasks=messages,
            options=to_handling(options, HandlingOptions),
        )
        return self._prepared(_COUNT, request, token_count, options, image)

    def batched(
        self,
        custom_id: str,
        image: ImageInput | None,
        tasks: Task | Tasks,
        options: HandlingOptions,
    ) -> batch_pb.CreateBatchRequest:
        """A request of a batch."""
        if isinstance(tasks, Task):
            field = kind_of("tasks", tasks).field
            prepared: Any = self.task(image, tasks, options, HandlingOptions)
        else:
            field, prepared = "analyze", self.analyze(cast(ImageInput, image), tasks, options)
        request = {field: prepared.request}
        return batch_pb.CreateBatchRequest(
            request=build(batch_pb.BatchRequest, custom_id=custom_id, **request)
        )

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
        timeout, session = options.get("timeout"), checked_session(options.get("session"))
        handling = {
            "timeout": None if timeout is None else self._connection.call_timeout(timeout),
            "metadata": self._connection.call_metadata(options.get("metadata"), session),
        }
        return FrameCall(
            config,
            by_key,
            lambda image, pixels: self._image(image, options, pixels),
            handling,
            reconnect,
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
    ) -> PreparedCall[EmbedResult]:
        image = self._loaded(image)
        if (whole_image, crops) not in _PARTS:
            wrong = f"{whole_image!r} and {crops!r}"
            raise InvalidRequestError(f"whole_image, crops: must be bools, one true, not {wrong}")
        request = build(
            pb.EmbedRequest,
            image=self._seen(image, options),
            embed=pb.EmbedTask(
                parts=_PARTS[whole_image, crops],
                pooling=choice("pooling", pooling, _POOLINGS),
                dtype=choice("dtype", dtype, _EMBEDDING_DTYPES),
            ),
            options=to_handling(options, HandlingOptions),
        )
        adapter = options.get("adapter") or ""
        reading = Reading(lambda response: embed_result(response, adapter))
        if streamed:
            stream = EmbedStream(adapter)
            reading = Reading(stream.result, stream.event)
        return self._prepared(_EMBED, request, reading, options, image)

    def _prepared(
        self,
        method: Method,
        request: Message,
        read: Reading[_E] | Callable[[Any], _E],
        options: HandlingOptions,
        *sources: ImageInput | None,
    ) -> PreparedCall[_E]:
        """Completes a call about images. ``sources``: those that the caller gave, or their handles."""
        images = list(request_images(request))
        digest = self._known.key(images[0]) if images else ""
        about = checked_session(options.get("session")) or digest
        reading = read if isinstance(read, Reading) else Reading(read)

        def result(response: Any) -> _E:
            for place, (image, seen) in enumerate(zip(images, response.info.images, strict=False)):
                self._known.learn(seen.image_id, image, digest if place == 0 else "")
                if restoring is not None and seen.image_id:
                    restoring.answered(image, seen.image_id)
            return reading.result(response)

        metadata = options.get("metadata")
        held = {
            source.image_id: source.source
            for source in sources
            if isinstance(source, ImageHandle) and source.source is not None
        }

        def put_again(image: common_pb2.Image, timeout: float | None) -> PreparedCall[ImageHandle]:
            return self.images.put_again(image, timeout, metadata, about)

        restoring = None
        if any(image.image_id for image in images):
            restoring = Restoring(
                self._known, request, held, put_again, self._connection.max_message_bytes
            )
        return prepare_call(
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

    def _image(
        self, image: ImageInput, options: HandlingOptions, pixels: list[Pixels] | None = None
    ) -> common_pb2.Image:
        message = to_image(image, self._connection.max_message_bytes, pixels)
        if (background := options.get("background")) is not None:
            if not isinstance(background, str):
                raise InvalidRequestError(f"background={background!r}: must be like '#ffffff'")
            message.background = background
        if (max_crops := options.get("max_crops")) is not None:
            message.MergeFrom(build(common_pb2.Image, max_crops=max_crops))
        return message

    def _seen(self, image: ImageInput, options: HandlingOptions) -> common_pb2.Image:
        """The image that the call is about, with its region."""
        message = self._image(image, options)
        if (region := options.get("region")) is not None:
            message.region.CopyFrom(to_region(region))
        return message
