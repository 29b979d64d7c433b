"""Analyze: several tasks on one image. several_objects.py runs the names of one Detect or Point call in the same way.

The image is prepared once. Each task then is a separate request of the engine. The engine schedules these requests like
all others, and they share the prefix of the image. The events of all tasks go to one stream, in the order in which they
occur. A task that fails becomes an error in its own result and leaves the other tasks running.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineMetrics,
    InferenceEngine,
    InvalidRequest,
    RequestError,
    SkillUnavailable,
    StreamUpdate,
    Tiles,
    clock,
)

from ...edge.calls.current_call import current_call
from ...edge.failures.errors import LocatedError
from ...edge.failures.statuses import Complaint, complaint, row_of
from ..messages.calls import (
    Fields,
    SkillCall,
    caption_arguments,
    detect_arguments,
    object_settings,
    point_arguments,
    query_settings,
    query_task_arguments,
    read_mask_format,
    score_setting,
    segment_arguments,
)
from ..messages.images import ImageSource, required_image
from ..messages.named_skill import skill_event
from ..messages.options import CallOptions, call_options, sampling_settings
from ..messages.responses import (
    caption_response,
    detect_response,
    point_response,
    query_response,
    rounded_ms,
    segment_response,
    usage_message,
)
from .starting import Respond, SharedImage, Starter, responded, submit
from .total_result import total_result

logger = logging.getLogger(__name__)

MAX_TASKS = 32
"""Also the most sequences of one call that wait or run at a time. A tiled request has one for each look."""

_KEY = re.compile(r"[!-~]{1,128}")

Send = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event. Takes the task's key ("" for the whole call) and the event's one field, by name."""

Event = Callable[[StreamUpdate], dict[str, Any]]
"""The one field of an event that holds an update, by name."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The conversions of one kind of task: fields to arguments and settings, result to response."""

    arguments: Callable[[Any], Fields]
    respond: Respond[Any]
    settings: Callable[[Any], Fields] = lambda fields: {}


_KINDS = {
    "query": _Kind(query_task_arguments, query_response, query_settings),
    "caption": _Kind(caption_arguments, caption_response),
    "point": _Kind(point_arguments, point_response, object_settings),
    "detect": _Kind(detect_arguments, detect_response, object_settings),
    "segment": _Kind(segment_arguments, segment_response, score_setting),
}
"""By the name of the task's field. The skill and the result's field have the same name."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One task of a call. ``name``: of the skill. ``fields``: its message, such as DetectTask."""

    key: str
    name: str
    fields: Any
    path: str = ""
    """The prefix of the fields' paths in the request, such as ``tasks[0].detect.``."""
    object_path: str = ""
    """The path of the field ``object``, if all other fields belong to the call."""

    def call(self, options: CallOptions) -> SkillCall:
        """Raises InvalidRequest."""
        kind = _KINDS[self.name]
        unspecified = pb.MASK_FORMAT_UNSPECIFIED
        return SkillCall(
            skill=self.name,
            image=None,
            arguments=kind.arguments(self.fields),
            settings={
                **sampling_settings(self.fields.sampling),
                **kind.settings(self.fields),
            },
            options=options,
            mask_format=read_mask_format(self.fields) if self.name == "segment" else unspecified,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """The objects that all tasks of a call share."""

    engine: InferenceEngine
    image: SharedImage
    options: CallOptions
    send: Send | None
    event: Event
    turns: asyncio.Semaphore
    """Limits the requests that wait or run at a time."""
    prefix: str
    """Precedes the paths of the tasks' fields."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Analysis:
    """The results of all tasks, in order, and what they used together."""

    results: list[pb.TaskResult]
    usage: common_pb2.Usage
    metrics: EngineMetrics
    total_time_ms: float
    model: str
    request_id: str
    image_size: common_pb2.ImageSize
    image_id: str


async def analyze(
    starter: Starter, request: pb.AnalyzeRequest, send: Send | None = None
) -> pb.AnalyzeResponse:
    """Answers a call of Analyze. ``send`` receives the events of a stream; None sends no events.

    Raises an error if the image, the options or the list of tasks is invalid.
    """
    options, source = call_options(request.options), required_image(request)
    tasks = read_tasks(request.tasks)
    done = await run_tasks(starter, options, source, tasks, send, skill_event)
    return pb.AnalyzeResponse(
        results=done.results,
        usage=done.usage,
        total_time_ms=done.total_time_ms,
        model=done.model,
        request_id=done.request_id,
        image_size=done.image_size,
        image_id=done.image_id,
    )


async def run_tasks(
    starter: Starter,
    options: CallOptions,
    source: ImageSource,
    tasks: Sequence[Task],
    send: Send | None,
    event: Event,
    *,
    tiles: Tiles | None = None,
    image: SharedImage | None = None,
    prefix: str = "",
) -> Analysis:
    """Runs all tasks on an image and returns their results. With ``tiles``, all tasks are Point or Detect.

    Raises an error if the image or an option is invalid. The failure of one task is its result instead, unless all
    tasks fail for fields that belong to the call. Cancellation ends all tasks. ``send`` receives the events of a
    stream, made by ``event``. ``image``: the image, if it is prepared. ``prefix`` precedes the paths of the tasks'
    fields.
    """
    began = clock.now()
    call = current_call()
    engine = starter.served.engine(options.model)
    if image is None:
        image = await starter.prepare(options, source, tiles)
    await call.accept()
    if send is not None:
        begun = pb.StreamStarted(request_id=call.request_id, model=engine.info.model)
        await send("", {"started": begun})
    turns = asyncio.Semaphore(max(1, MAX_TASKS // image.num_looks))
    shared = _Shared(engine, image, options, send, event, turns, prefix)
    done = await _all([_run(task, shared) for task in tasks])
    faults = [each.call_fault for each in done if each.call_fault is not None]
    if len(faults) == len(done):
        raise faults[0]
    metrics = [each.metrics for each in done if each.metrics is not None]
    call.result = total_result(call.request_id, metrics)
    used = call.result.metrics
    return Analysis(
        results=[each.result for each in done],
        usage=usage_message(used, engine.info.image_positions * len(metrics) * image.num_looks),
        metrics=used,
        total_time_ms=rounded_ms(1e3 * (clock.now() - began)),
        model=engine.info.model,
        request_id=call.request_id,
        image_size=common_pb2.ImageSize(width=image.size[0], height=image.size[1]),
        image_id=image.image_id,
    )


def read_tasks(tasks: Sequence[pb.AnalyzeTask]) -> list[Task]:
    """The tasks of a request. Raises InvalidRequest if their number or a key is invalid, or if a task is empty."""
    if not 1 <= len(tasks) <= MAX_TASKS:
        raise InvalidRequest("tasks", f"has {len(tasks)} tasks; must have 1 to {MAX_TASKS}")
    read: list[Task] = []
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        path = f"tasks[{index}]"
        key = task.key if task.HasField("key") else str(index)
        if _KEY.fullmatch(key) is None:
            raise InvalidRequest(
                f"{path}.key", "must be 1 to 128 visible ASCII characters (! to ~)"
            )
        if seen.setdefault(key, index) != index:
            raise InvalidRequest(f"{path}.key", f"{key!r} is already the key of tasks[{seen[key]}]")
        name = task.WhichOneof("task")
        if name is None:
            raise InvalidRequest(path, f"holds no task: set one of {', '.join(_KINDS)}")
        read.append(Task(key, name, getattr(task, name), f"{path}.{name}."))
    return read


async def _all(runs: Sequence[Coroutine[Any, Any, _Done]]) -> list[_Done]:
    """The results of all runs. If one raises, because an event could not be sent, or the call is cancelled, all end.

    This is no TaskGroup: in Python 3.11, the task of a group that failed looks cancelled from then on, and gRPC sends
    no status for a cancelled handler.
    """
    running = [asyncio.create_task(run) for run in runs]
    try:
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()  # Raises the exception, if there is one; the others may not have ended.
        return [task.result() for task in running]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    result: pb.TaskResult
    metrics: EngineMetrics | None
    call_fault: RequestError | None
    """The task's error, if it is in a field that belongs to the call."""


async def _run(task: Task, shared: _Shared) -> _Done:
    """Runs one task. The task's failure becomes its result."""
    metrics = call_fault = None
    try:
        response, metrics = await _respond(task, shared)
        result = pb.TaskResult(key=task.key, **{task.name: response})
    except _SendFailed as failed:
        raise failed.error from None
    except Exception as error:
        if task.object_path and isinstance(error, RequestError):
            if error.field == "object":
                error = LocatedError(error, task.object_path)
            else:
                call_fault = error
        result = pb.TaskResult(key=task.key, error=_task_error(error, task, shared))
    if shared.send is not None:
        await shared.send(task.key, {"task_final": result})
    return _Done(result, metrics, call_fault)


class _SendFailed(Exception):
    """An event could not be sent, which is not a failure of the task."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _respond(task: Task, shared: _Shared) -> tuple[Any, EngineMetrics]:
    async with shared.turns:
        return await _answer(task, shared)


async def _answer(task: Task, shared: _Shared) -> tuple[Any, EngineMetrics]:
    call = task.call(shared.options)
    stream = await submit(shared.engine, call, [shared.image.prepared])
    try:
        if shared.send is not None:
            async for update in stream:
                try:
                    await shared.send(task.key, shared.event(update))
                except Exception as error:
                    raise _SendFailed(error) from error
        result = await stream.result()
        response = await responded(shared.engine, call, result, _KINDS[task.name].respond)
        response.image_id = shared.image.image_id
        return response, result.metrics
    finally:
        await stream.aclose()


def _task_error(error: Exception, task: Task, shared: _Shared) -> pb.TaskError:
    request_id = current_call().request_id
    if not row_of(error).public:
        logger.error("request %s, task %s failed", request_id, task.key, exc_info=error)
    prefix = shared.prefix
    # A skill that the model does not have is a fault of options.model, not of the task's fields.
    path = prefix if isinstance(error, SkillUnavailable) else prefix + task.path
    return described_error(complaint(error, request_id, path))


def described_error(described: Complaint) -> pb.TaskError:
    """The error as a message."""
    return pb.TaskError(
        code=described.code.value[0],
        message=described.message,
        reason=described.reason,
        field_violations=[
            pb.TaskFieldViolation(field=field, description=description)
            for field, description in described.violations
        ],
    )
