"""The asynchronous client of the services that callers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from ..calls.frames import AsyncFrames, AsyncFrameSource
from ..calls.mapping import Progress, gather_bounded
from ..calls.requests.options import (
    CaptionLength,
    DetectOptions,
    GazeOptions,
    HandlingOptions,
    LateFrames,
    PointOptions,
    QueryOptions,
    SegmentOptions,
    TextOptions,
)
from ..calls.requests.requests import STUBS, Requests
from ..calls.streams import AsyncStream
from ..connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    ChannelOptions,
    Connection,
    Metadata,
    Tls,
)
from ..errors import KestrelError
from ..geometry import DetectedBox, DetectedPoint, PointInput
from ..images.image_forms import ImageHandle, ImageInput
from ..images.known import DEFAULT_KEPT_IMAGE_BYTES, ImageSource, KnownImages
from ..values.counting import TokenCount
from ..values.embeddings import Embedding, EmbeddingDtype, EmbedResult, Pooling
from ..values.events import Event, PathPiece, ReasoningDelta, TextDelta
from ..values.results.base import Result
from ..values.results.gazes import Gaze, GazeResult
from ..values.results.named_skill import SkillResult
from ..values.results.objects import DetectResult, PointResult
from ..values.results.outline import SegmentResult
from ..values.results.text import CaptionResult, QueryResult
from ..values.tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    GazeTask,
    ObjectNames,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
    Task,
    TaskDone,
    TaskEvent,
    TaskOf,
    Tasks,
)
from .batches import AsyncBatches
from .channel import AsyncChannel

T = TypeVar("T", bound=Result)


class AsyncKestrelClient(AsyncBatches):
    """Talks to Kestrel servers from one event loop. Use it in ``async with``, or call ``await aclose()`` at the end.

    ``target``: ``host:port``, ``unix:path`` or any gRPC target; for several servers a list of addresses or
    ``dns:///name:port``, or for a list that changes ``directory:`` with a file or an http(s) address: calls about the
    same image then go to the same server as long as it serves. ``tls``: True to trust public certificates, or a Tls.
    ``token``: sent as a bearer token; without TLS only to this machine. ``timeout``: seconds that a call may take
    unless it has its own ``timeout``; None for no limit. ``hedge_after``: seconds after which an unanswered call about
    an image is sent a second time, to another server if there are several; the first answer counts. None: never. At
    most a tenth of the calls are sent twice, and no streams. ``metadata``: sent with every call. ``max_message_bytes``:
    limit of a message in either direction, checked before sending; the server has its own limit.
    ``kept_image_bytes``: limit of the images that the client keeps, to put them again if a server does not know their
    ids. ``image_source``: asked for an image that is not kept, with its id; returns it, or None. ``channel_options``:
    gRPC's; they take precedence over the client's.

    Every method raises the errors that errors.py lists. CallOptions describes the arguments that all skills take.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        hedge_after: float | None = None,
        metadata: Metadata | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        kept_image_bytes: int = DEFAULT_KEPT_IMAGE_BYTES,
        image_source: ImageSource | None = None,
        channel_options: ChannelOptions = (),
    ) -> None:
        self._connection = Connection(
            target=target,
            tls=tls,
            token=token,
            timeout=timeout,
            hedge_after=hedge_after,
            metadata=metadata,
            max_message_bytes=max_message_bytes,
            channel_options=channel_options,
        )
        self._requests = Requests(self._connection, KnownImages(kept_image_bytes, image_source))
        self._channel = AsyncChannel(self._connection, STUBS)

    async def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        num_samples: int | None = None,
        **options: Unpack[QueryOptions],
    ) -> QueryResult:
        """Answers a question about an image, or without an image (``image=None``). See QueryOptions.

        ``num_samples``: how many answers to generate, at most 16: ``result.answers``. Answer i, counted from 0, has the
        seed ``seed + i``.
        """
        prepare = self._requests.skill
        return await self._channel.call(
            prepare, image, QueryTask, question, options, num_samples=num_samples
        )

    async def caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        *,
        num_samples: int | None = None,
        **options: Unpack[TextOptions],
    ) -> CaptionResult:
        """Describes an image. ``length``: "short", "normal" or "long". ``num_samples``: as for ``query``."""
        prepare = self._requests.skill
        return await self._channel.call(
            prepare, image, CaptionTask, length, options, num_samples=num_samples
        )

    async def point(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[PointOptions]
    ) -> PointResult:
        """Finds the centre of every object of one kind or several, like "red circle". Each point has a ``label`` and a
        ``score``. See PointOptions.

        ``objects``: a name, or up to 256 names: the result has the points of all of them, and ``result.errors`` says
        which names failed.
        """
        return await self._channel.call(self._requests.skill, image, PointTask, objects, options)

    async def detect(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[DetectOptions]
    ) -> DetectResult:
        """Finds the bounding box of every object of one kind or several. Each box has a ``label`` and a ``score``. See
        DetectOptions.

        ``objects``: as for ``point``.
        """
        return await self._channel.call(self._requests.skill, image, DetectTask, objects, options)

    async def segment(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[SegmentOptions]
    ) -> SegmentResult:
        """Outlines an object of one kind, or one of each of up to 256 kinds. See SegmentOptions."""
        return await self._channel.call(self._requests.skill, image, SegmentTask, objects, options)

    async def gaze(
        self,
        image: ImageInput,
        eyes: PointInput | Sequence[PointInput] = (),
        **options: Unpack[GazeOptions],
    ) -> GazeResult:
        """Finds what people look at. Each gaze has an ``eye``, a ``face`` and a ``target``, which is None if the person
        looks at something outside the image. See GazeOptions.

        ``eyes``: the place of an eye, or up to 256 places; default: ``faces``.
        """
        return await self._channel.call(self._requests.skill, image, GazeTask, eyes, options)

    def stream_query(
        self, image: ImageInput | None, question: str, **options: Unpack[QueryOptions]
    ) -> AsyncStream[QueryResult, TextDelta | ReasoningDelta]:
        """As ``query``; the stream gives the text as it is generated."""
        return self._channel.stream(self._requests.skill, image, QueryTask, question, options)

    def stream_caption(
        self,
        image: ImageInput,
        length: CaptionLength = "normal",
        **options: Unpack[TextOptions],
    ) -> AsyncStream[CaptionResult, TextDelta]:
        """As ``caption``; the stream gives the text as it is generated."""
        return self._channel.stream(self._requests.skill, image, CaptionTask, length, options)

    def stream_point(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[PointOptions]
    ) -> AsyncStream[PointResult, DetectedPoint]:
        """As ``point``; the stream gives each point as soon as it is final."""
        return self._channel.stream(self._requests.skill, image, PointTask, objects, options)

    def stream_detect(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[DetectOptions]
    ) -> AsyncStream[DetectResult, DetectedBox]:
        """As ``detect``; the stream gives each box as soon as it is final."""
        return self._channel.stream(self._requests.skill, image, DetectTask, objects, options)

    def stream_segment(
        self, image: ImageInput, objects: ObjectNames, **options: Unpack[SegmentOptions]
    ) -> AsyncStream[SegmentResult, DetectedBox | PathPiece]:
        """As ``segment``; the stream gives the model's box, then the commands of its path one by one. A refined outline
        comes with the result."""
        return self._channel.stream(self._requests.skill, image, SegmentTask, objects, options)

    def stream_gaze(
        self,
        image: ImageInput,
        eyes: PointInput | Sequence[PointInput] = (),
        **options: Unpack[GazeOptions],
    ) -> AsyncStream[GazeResult, DetectedBox | Gaze]:
        """As ``gaze``; the stream gives each face that the model finds, and each gaze as soon as it is final."""
        return self._channel.stream(self._requests.skill, image, GazeTask, eyes, options)

    async def put_image(
        self,
        image: ImageInput,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        session: str | None = None,
    ) -> ImageHandle:
        """Stores an image on the server. Later calls take the handle in place of the image.

        Large files are uploaded in pieces. ``session``: as in HandlingOptions.
        """
        prepare = self._requests.images.put
        return await self._channel.call(prepare, image, timeout, metadata, session)

    async def delete_image(
        self,
        image: ImageHandle | str,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        session: str | None = None,
    ) -> bool:
        """Deletes an image from its server. Returns whether it was stored there. ``session``: as in HandlingOptions."""
        prepared = self._requests.images.delete(image, timeout, metadata, session)
        return await self._channel.send(prepared)

    async def analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> AnalyzeResult:
        """Runs several tasks on one image, like ``[QueryTask("What is this?"), DetectTask("circle")]``.

        A task that fails does not affect the others: see AnalyzeResult.
        """
        return await self._channel.call(self._requests.analyze, image, tasks, options)

    def stream_analyze(
        self, image: ImageInput, tasks: Tasks, **options: Unpack[HandlingOptions]
    ) -> AsyncStream[AnalyzeResult, TaskEvent | TaskDone]:
        """As ``analyze``; the stream gives the events of all tasks as they happen."""
        return self._channel.stream(self._requests.analyze, image, tasks, options)

    async def map(
        self,
        images: Iterable[ImageInput],
        task: TaskOf[T],
        *,
        concurrency: int = 8,
        progress: Progress | None = None,
        **options: Unpack[HandlingOptions],
    ) -> list[T | KestrelError]:
        """Runs one task, like ``DetectTask("circle")``, on each image. Returns the results in the order of the images.

        At most ``concurrency`` requests run at once. An iterator is read no faster than requests start. A request that
        fails gives its KestrelError in place of a result. ``progress(done, total)`` is called after each image;
        ``total`` is None for an iterator.
        """

        async def ask(image: ImageInput) -> T:
            prepare = self._requests.task
            return await self._channel.call(prepare, image, task, options, HandlingOptions)

        return await gather_bounded(images, ask, concurrency, progress)

    async def run_skill(
        self,
        skill: str,
        image: ImageInput | None = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> SkillResult:
        """Runs any skill of the model by its name, including skills that a plug-in adds to the server.

        The skill defines ``arguments`` and ``settings``: plain values by name. Raises NotFoundError if the model has no
        such skill.
        """
        task = SkillTask(skill, arguments, settings)
        return await self._channel.call(self._requests.task, image, task, options)

    def stream_skill(
        self,
        skill: str,
        image: ImageInput | None = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncStream[SkillResult, Event]:
        """As ``run_skill``; the stream gives the events of the skill as they happen."""
        task = SkillTask(skill, arguments, settings)
        return self._channel.stream(self._requests.task, image, task, options)

    async def count_tokens(
        self,
        image: ImageInput | None,
        tasks: Task | Tasks,
        **options: Unpack[HandlingOptions],
    ) -> TokenCount:
        """Counts the positions of the model's context that a task, or several as for ``analyze``, would take. The
        model computes nothing, and the server reads only the header of the image.

        ``count.input_tokens`` is what ``result.usage`` will say, ``count.room_tokens`` what is left for the answer.
        """
        return await self._channel.call(self._requests.count, image, tasks, options)

    async def embed(
        self,
        image: ImageInput,
        *,
        whole_image: bool = True,
        crops: bool = False,
        pooling: Pooling = "mean",
        dtype: EmbeddingDtype = "float32",
        **options: Unpack[HandlingOptions],
    ) -> EmbedResult:
        """Returns embeddings of an image, for search and comparison: ``result.whole_image.array`` is a numpy array.

        ``whole_image``, ``crops``: whether to return the embedding of the whole image, and those of its crops.
        ``pooling``: "mean" gives one vector of length 1 each, so that the product of two vectors is their cosine
        similarity; "none" gives one vector for each patch. ``dtype``: of the numbers.
        """
        prepare = self._requests.embed
        return await self._channel.call(prepare, image, whole_image, crops, pooling, dtype, options)

    def stream_embed(
        self,
        image: ImageInput,
        *,
        whole_image: bool = True,
        crops: bool = False,
        pooling: Pooling = "mean",
        dtype: EmbeddingDtype = "float32",
        **options: Unpack[HandlingOptions],
    ) -> AsyncStream[EmbedResult, Embedding]:
        """As ``embed``; the stream gives the embeddings one by one. Together they may exceed the limit of a message."""
        prepare = self._requests.embed
        return self._channel.stream(
            prepare, image, whole_image, crops, pooling, dtype, options, streamed=True
        )

    async def embed_many(
        self,
        images: Iterable[ImageInput],
        *,
        crops: bool = False,
        pooling: Pooling = "mean",
        dtype: EmbeddingDtype = "float32",
        concurrency: int = 8,
        progress: Progress | None = None,
        **options: Unpack[HandlingOptions],
    ) -> list[EmbedResult | KestrelError]:
        """Runs ``embed`` on each image, as ``map`` runs a task. Returns the results in the order of the images."""

        async def embed(image: ImageInput) -> EmbedResult:
            prepare = self._requests.embed
            return await self._channel.call(prepare, image, True, crops, pooling, dtype, options)

        return await gather_bounded(images, embed, concurrency, progress)

    def frames(
        self,
        tasks: Tasks,
        source: AsyncFrameSource,
        *,
        latency_budget_ms: int | None = None,
        late: LateFrames = "keep",
        max_in_flight: int | None = None,
        reconnect: bool = True,
        **options: Unpack[HandlingOptions],
    ) -> AsyncFrames:
        """Runs the same tasks on every frame of ``source``, such as the images of a camera, and iterates over a
        FrameResult for each frame: ``for frame in client.frames([task], source): print(frame[task].objects)``.

        ``latency_budget_ms``: how long a frame may wait. With a budget, a newer frame takes the place of one that
        waits; without one, no frame is dropped, and the source is read as fast as frames are answered. ``late``: what
        becomes of a frame that would be answered after the budget: "keep" computes it like all others, "overview"
        with its overview only. ``max_in_flight``: frames that are computed at the same time; default 2.
        ``reconnect``: whether another stream continues after UnavailableError. Frames that were under way have
        ``dropped="lost"``. ``timeout``: of the whole stream; default: none.
        """
        return self._channel.frames(
            self._requests.frames,
            source,
            tasks,
            latency_budget_ms,
            late,
            max_in_flight,
            reconnect,
            options,
        )
