"""Run: the one way from a call's tasks to their responses.

A task becomes a list of requests of the engine: one for each name that it finds, or for each sample. A call with one
request gives the engine the images as they are. A call with several has its images prepared once, and its requests
share their prefix. The engine schedules these requests like all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple

from google.rpc import status_pb2

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineResult,
    EngineStream,
    FieldPath,
    InvalidRequest,
    Request,
    RequestError,
    Tiles,
    clock,
    path_text,
)

from ...edge.calls.current_call import current_call
from ...edge.failures.endings import forget_frames
from ...edge.failures.errors import inside, located
from ...edge.failures.statuses import complaint, row_of
from ...images.request_images import RequestImages
from ...served_model import ServedModels
from ..messages.named_skill import check_skill
from ..messages.options import CallOptions
from ..messages.responses import (
    Found,
    event_fields,
    timings_message,
    timings_of_several,
    usage_message,
)
from ..messages.task_fields import task_path
from ..messages.tasks import label_of
from .call_images import CallImages
from .kinds import Event, Kind, Part, Response
from .sender import Sender
from .total_result import total_result
from .turns import Turns, all_of

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 32
"""Most sequences of one call that wait or run at a time. A tiled request has one for each look."""

_SEEDS = 2**63

_OPTIONS = frozenset(common_pb2.RequestOptions.DESCRIPTOR.fields_by_name)


class CallTask(NamedTuple, Generic[Part, Response]):
    """One task of a call. ``message``: such as a DetectTask. ``path``: of the task in the call's message."""

    kind: Kind[Part, Response]
    message: Any
    path: FieldPath
    key: str = ""

    @property
    def has_tiles(self) -> bool:
        return "tiles" in self.message.DESCRIPTOR.fields_by_name and self.message.HasField("tiles")


class _Ended(NamedTuple, Generic[Part]):
    """A request that has ended."""

    part: Part
    result: EngineResult | None
    """None if it failed."""
    task_fault: RequestError | None = None
    """The error of one name, if it is in a field that all names share."""


class Run:
    """The tasks of one call, whose images are found first. A call with several tasks then has them prepared, and
    begins."""

    def __init__(
        self,
        served: ServedModels,
        images: RequestImages,
        options: CallOptions,
        *,
        sender: Sender | None = None,
        keeps_images: bool = True,
    ) -> None:
        """``sender``: of a stream. ``keeps_images``: stores the images. Raises ModelNotReady, ModelNotFoundError."""
        self._call, self._options, self._sender = current_call(), options, sender
        with inside(*options.path):
            self.engine = served.engine(options.model)
        self.began = clock.now()
        self.images = CallImages(images, self.engine, options, keeps=keeps_images)
        self._info: common_pb2.RequestInfo | None = None
        """None until the call is accepted."""
        self._turns: Turns | None = None

    async def prepare(self) -> None:
        """Prepares the images for all tasks, and accepts the call."""
        with located(self.images.path_of):
            await self.images.prepare()
        await self.begin()

    async def begin(self, seed: int = 0) -> None:
        """Accepts a call whose images are prepared."""
        self._turns = Turns(MAX_SEQUENCES)
        if self._sender is not None:
            self._sender.is_shared = True
        await self._begin(self.images.sizes, seed)

    async def answer(self, task: CallTask[Part, Response]) -> tuple[Response, list[EngineResult]]:
        """The response of a task, and the results of its requests. Raises the error that the task fails with."""
        with inside(*task.path):
            tiles = task.kind.tiles(task.message)
            requests = task.kind.requests(task.message, len(self.images))
            if isinstance(task.message, pb.SkillTask):
                check_skill(task.message.name, self.engine.info.skills)
        with located(lambda path: self._path_of(task, path)):
            return await self._answer(task, requests, tiles)

    async def _answer(
        self, task: CallTask[Part, Response], requests: list[Request], tiles: Tiles | None
    ) -> tuple[Response, list[EngineResult]]:
        began, several, seed = clock.now(), len(requests) > 1, 0
        if several and not task.kind.has_names and self._sender is not None:
            raise InvalidRequest(
                "num_samples",
                f"must be 1 in a stream, got {len(requests)}; open a stream for each sample, with seeds of your choice",
            )
        if several:
            requests = self._seeded(task.kind, requests)
            seed = requests[0].settings["seed"]
            if self._turns is None:
                await self.images.prepare(tiles)
                await self.begin(seed)
        given = await self.images.given(tiles)
        if not several:
            ended = [await self._ended(task, requests[0], given)]
        elif task.kind.has_names:
            ended = await self._names(task, requests, given)
        else:
            ended = await self._samples(task, requests, given)
        parts = [each.part for each in ended]
        if several and task.kind.merge is not None:
            await asyncio.to_thread(task.kind.merge, task.message, parts)
        results = [each.result for each in ended if each.result is not None]
        made = task.kind.response(next(iter(results), None), parts)
        response: Any = made
        if not several:
            seed = results[0].seed if task.kind.generates else 0
            metrics = results[0].metrics
            timings = timings_message(metrics)
        else:
            metrics = total_result("", [result.metrics for result in results]).metrics
            timings = timings_of_several(metrics, 1e3 * (clock.now() - began))
        response.timings.CopyFrom(timings)
        if task.kind.generates:
            response.usage.CopyFrom(usage_message(metrics, self.image_tokens(results)))
        response.info.CopyFrom(self.info(seed))
        return made, results

    def info(self, seed: int = 0) -> common_pb2.RequestInfo:
        """What is known of the call since it was accepted: one message, which changes with ``seed``."""
        assert self._info is not None, "the call is accepted"
        self._info.seed = seed
        return self._info

    def image_tokens(self, results: Sequence[EngineResult]) -> int:
        """The positions that images took in the prompts of the requests."""
        looks = sum(len(result.images) * result.num_looks for result in results)
        return looks * self.engine.info.image_positions

    def status(self, error: Exception, task: CallTask[Any, Any]) -> status_pb2.Status:
        """The status that a task, or one of its names, has failed with."""
        request_id = self._call.request_id
        if not row_of(error).public:
            logger.error(
                "request %s, task %s failed", request_id, path_text(task.path), exc_info=error
            )
        return complaint(error, request_id).status

    def _path_of(self, task: CallTask[Any, Any], path: FieldPath, index: int = 0) -> FieldPath:
        """The path in the call's message of what the engine names ``path``. ``index``: as for task_path."""
        if not path:
            return path
        own = task_path(task.message, path, index)
        if own is not None:
            return (*task.path, *own)
        if path[0] in ("skill", "segment"):
            path = ("model",)  # It does not have the skill. The caller can change only the model.
        if path[0] in _OPTIONS:
            return (*self._options.path, *path)
        if path[0] not in ("image", "images") and isinstance(task.message, pb.SkillTask):
            return (*task.path, "arguments", *path)
        if path == ("image",) and task.kind.name == "query" and not len(self.images):
            return ("images", 0)
        return self.images.path_of(path)

    def is_of_task(self, error: Exception) -> bool:
        """Whether ``error`` is a failure of a task. An event that could not be sent ends the call."""
        return self._sender is None or error is not self._sender.failure

    async def send(self, task: CallTask[Any, Any], event: Event) -> None:
        """Sends an event of a task, if the call is a stream."""
        if self._sender is not None:
            await self._sender.send(event, task.key)

    async def _names(
        self,
        task: CallTask[Part, Response],
        requests: Sequence[Request],
        given: Sequence[Any],
    ) -> list[_Ended[Part]]:
        """The requests of several names, each of which fails alone. Raises an error that is in a field of the task, if
        all fail with such errors."""
        ended = await all_of(
            [self._named(task, index, each, given) for index, each in enumerate(requests)]
        )
        faults = [each.task_fault for each in ended if each.task_fault is not None]
        if len(faults) == len(ended):
            raise faults[0]
        return ended

    async def _named(
        self, task: CallTask[Any, Any], index: int, request: Request, given: Sequence[Any]
    ) -> _Ended[Any]:
        try:
            return await self._ended(task, request, given)
        except Exception as error:
            if not self.is_of_task(error):
                raise
            told, fault = error, None
            if isinstance(error, RequestError):
                told = error.at(self._path_of(task, error.path, index))
                fault = None if error.path == ("object",) else error
            search = pb.ObjectSearch(object=label_of(request), error=self.status(told, task))
            forget_frames(error)  # They hold the image, and this frame holds the error.
            await self.send(task, {"search": search})
            return _Ended(Found([], search), None, fault)

    async def _samples(
        self,
        task: CallTask[Part, Response],
        requests: Sequence[Request],
        given: Sequence[Any],
    ) -> list[_Ended[Part]]:
        """The requests of several samples. The first that fails ends the others. The first sample looks for the objects
        that the question presupposes, for all of them."""
        first, *others = requests
        if "presupposes" not in first.arguments:
            return await all_of([self._ended(task, each, given) for each in requests])
        looked = asyncio.Event()
        abstained: list[EngineResult] = []

        async def note(stream: EngineStream) -> None:
            if stream.done and (result := await stream.result()).abstained:
                abstained.append(result)
            looked.set()

        async def later(request: Request) -> _Ended[Part]:
            await looked.wait()
            if abstained:
                same = replace(abstained[0], seed=request.settings["seed"])
                return _Ended(task.kind.part(same, label_of(request)), None)
            return await self._ended(task, request, given)

        arguments = {k: value for k, value in first.arguments.items() if k != "presupposes"}
        rest = [later(replace(each, arguments=arguments)) for each in others]
        return await all_of([self._ended(task, first, given, note), *rest])

    async def _ended(
        self,
        task: CallTask[Part, Response],
        request: Request,
        given: Sequence[Any],
        note: Callable[[EngineStream], Awaitable[None]] | None = None,
    ) -> _Ended[Part]:
        """Runs a request to its end. ``note`` is called when the engine has accepted it."""
        if self._turns is None:
            return await self._ran(task, request, given, note)
        async with self._turns.of(len(given[0].looks) if given else 1):
            return await self._ran(task, request, given, note)

    async def _ran(
        self,
        task: CallTask[Part, Response],
        request: Request,
        given: Sequence[Any],
        note: Callable[[EngineStream], Awaitable[None]] | None,
    ) -> _Ended[Part]:
        stream, label = await self._submit(task, request, given), label_of(request)
        try:
            if note is not None:
                await note(stream)
            if self._info is None:
                sizes = [(each.size, bytes.fromhex(each.digest)) for each in stream.images]
                await self._begin(sizes, stream.seed if task.kind.generates else 0)
            if self._sender is not None:
                async for update in stream:
                    await self._sender.send(event_fields(update, label), task.key)
            result = await stream.result()
            if self._turns is None:
                self._call.result = result
        finally:
            await stream.aclose()
        kind = task.kind
        part = kind.part(result, label)
        if kind.complete is not None and result.image_size is not None:
            await kind.complete(task.message, part, result.image_size)
        if self._sender is not None:
            for event in kind.last_events(part):
                await self._sender.send(event, task.key)
        return _Ended(part, result)

    async def _submit(
        self, task: CallTask[Part, Response], request: Request, given: Sequence[Any]
    ) -> EngineStream:
        """If the deadline passes while the request waits, the engine computes nothing."""
        options, call = self._options, self._call
        whole = replace(
            request,
            images=tuple(given),
            adapter=options.adapter,
            request_id=call.request_id,
            priority=options.priority,
            deadline_at=call.deadline_at,
            cache_salt=call.principal.namespace(options.cache_salt),
            principal=call.principal.name,
            weight=call.principal.weight,
        )
        try:
            return await self.engine.start(whole)
        except RequestError as error:
            most = error.most_tokens
            if call.caps_max_tokens and most is not None:
                capped = replace(request, settings={**request.settings, "max_tokens": most})
                task.message.max_tokens = most  # So that a captured request can be done again.
                return await self._submit(task, capped, given)
            raise

    async def _begin(self, sizes: Sequence[tuple[tuple[int, int], bytes]], seed: int) -> None:
        """Accepts the call. ``sizes``: as for CallImages."""
        model, request_id = self.engine.info.model, self._call.request_id
        self._info = common_pb2.RequestInfo(request_id=request_id, model=model)
        self.images.keep(sizes, self._info)
        await self._call.accept()
        if self._sender is not None:
            await self._sender.send({"started": self.info(seed)})

    def _seeded(self, kind: Kind[Any, Any], requests: Sequence[Request]) -> list[Request]:
        """Several requests with their seeds: one for all names, or seeds in a row for samples."""
        step = 0 if kind.has_names else 1
        seed = requests[0].settings.get("seed")
        if seed is None:
            seed = self.engine.draw_seed(1 + step * (len(requests) - 1))
        # The engine refuses a seed below 0.
        seeds = [(seed + step * i) % _SEEDS if seed >= 0 else seed for i in range(len(requests))]
        return [
            replace(each, settings={**each.settings, "seed": own})
            for each, own in zip(requests, seeds, strict=True)
        ]
