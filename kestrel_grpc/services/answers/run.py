"""Run: the one way from a call's tasks to their responses.

A task becomes a list of requests of the engine: one for each name that it finds, or for each sample. A call with one
request gives the engine the images as they are. A call with several has its images prepared once, and its requests
share their prefix. The engine schedules these requests like all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.rpc import status_pb2

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineMetrics,
    EngineResult,
    EngineStream,
    FieldPath,
    InvalidRequest,
    Request,
    RequestError,
    SeenImage,
    Tiles,
    clock,
    path_text,
)

from ...edge.calls.call import Context
from ...edge.calls.current import current
from ...edge.failures.statuses import complaint, row_of
from ...edge.messages.fields import located
from ...images.request_images import RequestImages
from ...served_model import ServedModels
from ..messages.named_skill import check_skill
from ..messages.responses import event_fields, set_timings, set_usage, timings_of_several
from ..messages.task_fields import task_path
from ..messages.tasks import label_of
from .call_images import CallImages
from .kinds import CallTask, Event, Part, Response
from .several import (
    MAX_SEQUENCES,
    PartResult,
    SequenceTurns,
    of_names,
    of_samples,
    seeded,
    total_result,
)

logger = logging.getLogger(__name__)

Note = Callable[[EngineStream], Awaitable[None]]
_OPTIONS = frozenset(common_pb2.RequestOptions.DESCRIPTOR.fields_by_name)


class Sender:
    """Counts the events of one stream. ``message``: the type of its messages."""

    def __init__(self, context: Context, message: Callable[..., Any]) -> None:
        self._context, self._message = context, message
        self._sequence, self._writing = 0, asyncio.Lock()
        self.is_shared = False
        """Several tasks or requests send events at the same time."""
        self.failure: Exception | None = None
        """The error of the event that could not be sent. It is no failure of the task."""

    async def send(self, event: Mapping[str, Any], key: str = "") -> None:
        """Sends an event. ``event``: its one field, by name. ``key``: of its task, in a stream of several tasks."""
        if key:
            event = {**event, "key": key}
        if not self.is_shared:
            await self._write(event)
            return
        # gRPC allows one write at a time, and none after one that was given up.
        async with self._writing:
            if self.failure is not None:
                raise self.failure
            await self._write(event)

    async def _write(self, event: Mapping[str, Any]) -> None:
        try:
            await self._context.write(self._message(sequence=self._sequence, **event))
        except Exception as error:
            self.failure = error
            raise
        self._sequence += 1


class Run:
    """The tasks of one call, whose images are found first. A call with several tasks then has them prepared, and
    begins."""

    def __init__(
        self,
        served: ServedModels,
        images: RequestImages,
        *,
        sender: Sender | None = None,
        keeps_images: bool = True,
    ) -> None:
        """``sender``: of a stream. ``keeps_images``: stores the images. Raises ModelNotReady, ModelNotFoundError."""
        self._call, self._sender = current.get(), sender
        self._options = options = self._call.options
        try:
            self.engine = served.engine(options.model)
        except RequestError as error:
            raise error.at((*options.path, *error.path)) from error
        self.began = clock.now()
        self.images = CallImages(images, self.engine, keeps=keeps_images)
        self._info: common_pb2.RequestInfo | None = None
        """None until the call is accepted."""
        self._turns: SequenceTurns | None = None
        self._is_cancelled = False
        """A request of the call was cancelled. Those that begin later are cancelled, too."""
        self._not_begun: dict[str, EngineResult] = {}
        """The result of a request that was cancelled before its first token, by skill. Further ones do not begin."""

    async def prepare(self) -> None:
        """Prepares the images for all tasks, and accepts the call."""
        with located(self.images.path_of):
            await self.images.prepare()
        await self.begin()

    async def begin(self, seed: int = 0) -> None:
        """Accepts a call whose images are prepared."""
        self._turns = SequenceTurns(MAX_SEQUENCES)
        if self._sender is not None:
            self._sender.is_shared = True
        await self.accept(self.images.seen, seed)

    def requests_of(self, task: CallTask[Any, Any]) -> tuple[Tiles | None, list[Request]]:
        """How a task cuts the image, and the requests that answer it. Raises RequestError."""
        try:
            tiles = None if task.kind.tiles is None else task.kind.tiles(task.message)
            requests = task.kind.requests(task.message, len(self.images))
            if task.kind.name == "skill":
                check_skill(task.message.name, self.engine.info.skills)
        except RequestError as error:
            raise error.at((*task.path, *error.path)) from error
        return tiles, requests

    async def answer(self, task: CallTask[Part, Response]) -> tuple[Response, list[EngineResult]]:
        """The response of a task, and the results of its requests. Raises the error that the task fails with."""
        tiles, requests = self.requests_of(task)
        seed = 0
        has_more = task.kind.has_more_requests
        several = len(requests) > 1 or (has_more is not None and has_more(task.message))
        try:
            if several and task.kind.are_samples and self._sender is not None:
                raise InvalidRequest(
                    "num_samples",
                    f"must be 1 in a stream, got {len(requests)}; open a stream for each sample, with seeds of your "
                    "choice",
                )
            if several:
                began = clock.now()
                requests = seeded(self.engine, task.kind, requests)
                seed = requests[0].settings["seed"]
                if self._turns is None:
                    await self.images.prepare(tiles)
                    await self.begin(seed)
            images = await self.images.of_task(tiles)
            if task.kind.in_rounds is not None:
                ended = await task.kind.in_rounds(self, task, requests, images)
            elif not several:
                begin = self._ended if self._turns is None else self.ended
                ended = [await begin(task, requests[0], images)]
            elif task.kind.are_samples:
                ended = await of_samples(self, task, requests, images)
            else:
                ended = await of_names(self, task, requests, images)
        except RequestError as error:
            raise error.at(self.path_of(task, error.path)) from error
        parts = [each.part for each in ended]
        if several and task.kind.merge is not None:
            await asyncio.to_thread(task.kind.merge, task.message, parts)
        results = [each.result for each in ended if each.result is not None]
        made = task.kind.response(results[0] if results else None, parts)
        response: Any = made
        if not several:
            seed = results[0].seed if task.kind.generates else 0
            metrics = results[0].metrics
            set_timings(response.timings, metrics)
        else:
            metrics = total_result("", [result.metrics for result in results]).metrics
            elapsed_ms = 1e3 * (clock.now() - began)
            response.timings.CopyFrom(timings_of_several(metrics, elapsed_ms))
        set_usage(response.usage, metrics)
        response.info.CopyFrom(self.info(seed))
        return made, results

    def info(self, seed: int = 0) -> common_pb2.RequestInfo:
        """What is known of the call since it was accepted: one message, which changes with ``seed``."""
        assert self._info is not None, "the call is accepted"
        self._info.seed = seed
        return self._info

    def status(self, error: Exception, task: CallTask[Any, Any]) -> status_pb2.Status:
        """The status that a task, or one of its names, has failed with."""
        request_id = self._call.request_id
        if not row_of(error).public:
            logger.error(
                "request %s, task %s failed", request_id, path_text(task.path), exc_info=error
            )
        return complaint(error, request_id).status

    def path_of(self, task: CallTask[Any, Any], path: FieldPath, index: int = 0) -> FieldPath:
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

    async def ended(
        self,
        task: CallTask[Part, Response],
        request: Request,
        images: Sequence[Any],
        note: Note | None = None,
    ) -> PartResult[Part]:
        """Runs a request to its end, in its turn. ``note`` is called when the engine has accepted it."""
        if self._turns is None:
            return await self._ended(task, request, images, note)
        async with self._turns.of(len(images[0].looks) if images else 1):
            return await self._ended(task, request, images, note)

    async def _ended(
        self,
        task: CallTask[Part, Response],
        request: Request,
        images: Sequence[Any],
        note: Note | None = None,
    ) -> PartResult[Part]:
        kind = task.kind
        result = self._not_begun.get(request.skill) if note is None else None
        if result is None:
            result = await self._result(task, request, images, note)
        part = kind.part(result, label_of(request))
        if kind.complete is not None and result.image_size is not None:
            await kind.complete(task.message, part, result.image_size)
        if self._sender is not None:
            for event in kind.last_events(part):
                await self._sender.send(event, task.key)
        return PartResult(part, result)

    async def _result(
        self,
        task: CallTask[Part, Response],
        request: Request,
        images: Sequence[Any],
        note: Note | None,
    ) -> EngineResult:
        stream = await self._submit(task, request, images)
        is_late = self._is_cancelled
        try:
            if is_late:
                stream.cancel()
            if note is not None:
                await note(stream)
            if self._info is None:
                await self.accept(stream.images, stream.seed if task.kind.generates else 0)
            if self._sender is not None and task.kind.has_updates:
                label = label_of(request)
                async for update in stream:
                    await self._sender.send(event_fields(update, label), task.key)
            result = await stream.result()
            if self._turns is None:
                self._call.result = result
        finally:
            await stream.aclose()
        # It may have ended before the cancellation came.
        self._is_cancelled |= stream.is_cancelled
        if is_late and not result.token_ids and result.finish_reason == "cancelled":
            self._not_begun[request.skill] = replace(result, metrics=EngineMetrics())
        return result

    def whole(self, request: Request, images: Sequence[Any]) -> Request:
        """The request of a task with all that the call says of it."""
        options, call = self._options, self._call
        return Request(  # Takes half the time of dataclasses.replace.
            skill=request.skill,
            arguments=request.arguments,
            settings=request.settings,
            images=tuple(images),
            adapter=options.adapter,
            request_id=call.request_id,
            priority=options.priority,
            deadline_at=call.deadline_at,
            cache_salt=call.principal.namespace(options.cache_salt),
            principal=call.principal.name,
            weight=call.principal.weight,
            reserve=call.reserve,
        )

    async def _submit(
        self, task: CallTask[Part, Response], request: Request, images: Sequence[Any]
    ) -> EngineStream:
        """If the deadline passes while the request waits, the engine computes nothing."""
        try:
            return await self.engine.start(self.whole(request, images))
        except RequestError as error:
            most = error.most_tokens
            if self._call.caps_max_tokens and most is not None:
                capped = replace(request, settings={**request.settings, "max_tokens": most})
                task.message.max_tokens = most  # So that a captured request can be done again.
                return await self._submit(task, capped, images)
            raise

    async def accept(self, seen: Sequence[SeenImage], seed: int = 0) -> None:
        """Accepts the call. ``seen``: its images."""
        model, request_id = self.engine.info.model, self._call.request_id
        self._info = common_pb2.RequestInfo(request_id=request_id, model=model)
        self.images.keep(seen, self._info)
        # The first message and the response wait until it is sent.
        self._call.greet(self._call.ids)
        if self._sender is not None:
            await self._sender.send({"started": self.info(seed)})
