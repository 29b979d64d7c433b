"""Analyze: several tasks on one picture. Owns how they share it, how their events mix, and what a failed one tells.

The picture is prepared once; then every task is a request of the engine of its own, so that they are scheduled like any
others and share the picture's prefix. Their events are told one at a time, as they come.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineMetrics,
    EngineResult,
    InferenceEngine,
    InvalidRequest,
    PreparedImage,
    SkillUnavailable,
)

from ..edge.current_call import current_call
from ..edge.statuses import complaint, row_of
from . import convert
from .convert import CallOptions, SkillCall
from .named_skill import skill_event
from .starting import Respond, Starter, responded, submit

logger = logging.getLogger(__name__)

MAX_TASKS = 32
_KEY = re.compile(r"[!-~]{1,128}")

Tell = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event: the task's key ("" for the call as a whole) and the one field that it fills."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a kind of task becomes a call and a result."""

    arguments: Callable[[Any], convert.Fields]
    respond: Respond[Any]
    settings: Callable[[Any], convert.Fields] = lambda fields: {}


_KINDS = {
    "query": _Kind(convert.query_arguments, convert.query_response),
    "caption": _Kind(convert.caption_arguments, convert.caption_response),
    "point": _Kind(convert.point_arguments, convert.point_response, convert.max_objects),
    "detect": _Kind(convert.detect_arguments, convert.detect_response, convert.max_objects),
    "segment": _Kind(convert.segment_arguments, convert.segment_response),
}
"""By the name of the task's field, which is the skill's name and the result's field as well."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    key: str
    name: str
    fields: Any
    path: str
    """Where the fields stand in the request."""

    def call(self, options: CallOptions) -> SkillCall:
        """Raises InvalidRequest."""
        kind = _KINDS[self.name]
        unspecified = pb.MASK_FORMAT_UNSPECIFIED
        return SkillCall(
            skill=self.name,
            image=None,
            arguments=kind.arguments(self.fields),
            settings={
                **convert.sampling_settings(self.fields.sampling),
                **kind.settings(self.fields),
            },
            options=options,
            mask_format=convert.mask_format(self.fields) if self.name == "segment" else unspecified,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What all tasks of a call share."""

    engine: InferenceEngine
    image: PreparedImage
    image_id: str
    options: CallOptions
    tell: Tell | None


async def analyze(
    starter: Starter, request: pb.AnalyzeRequest, tell: Tell | None = None
) -> pb.AnalyzeResponse:
    """Does all tasks; raises for what is wrong with picture or request as a whole. Cancelled, it ends all tasks."""
    began = time.monotonic()
    call = current_call()
    options, source = convert.call_options(request.options), convert.required_image(request)
    tasks = _read_tasks(request.tasks)
    engine = starter.served.engine(options.model)
    picture = starter.pictures.find(call.owner, source)
    image = await engine.prepare_image(
        picture.given,
        timeout_s=call.timeout_s,
        cache_salt=call.principal.namespace(options.cache_salt),
        request_id=call.request_id,
        priority=options.priority,
        principal=call.principal.name,
        weight=call.principal.weight,
    )
    size = (image.width, image.height)
    image_id = await starter.pictures.keep(call.owner, picture, size, weight=call.principal.weight)
    await call.accept()
    if tell is not None:
        begun = pb.StreamStarted(request_id=call.request_id, model=engine.info.model)
        await tell("", {"started": begun})
    shared = _Shared(engine, image, image_id, options, tell)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_run(task, shared)) for task in tasks]
    except (
        BaseExceptionGroup
    ) as failed:  # An event couldn't be told: a task's own failure is its result.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError from None
        raise failed.exceptions[0] from None
    results = [task.result() for task in running]
    metrics = [metrics for _, metrics in results if metrics is not None]
    call.result = _total(call.request_id, metrics)
    used = call.result.metrics
    return pb.AnalyzeResponse(
        results=[result for result, _ in results],
        usage=common_pb2.Usage(
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cached_tokens=used.cached_tokens,
            image_tokens=engine.info.image_positions * len(metrics),
        ),
        total_time_ms=convert.milliseconds(1e3 * (time.monotonic() - began)),
        model=engine.info.model,
        request_id=call.request_id,
        image_size=common_pb2.ImageSize(width=size[0], height=size[1]),
        image_id=image_id,
    )


def _read_tasks(tasks: Sequence[pb.AnalyzeTask]) -> list[_Task]:
    """Raises InvalidRequest for what leaves results without a task to belong to."""
    if not 1 <= len(tasks) <= MAX_TASKS:
        raise InvalidRequest("tasks", f"has {len(tasks)} tasks; 1 to {MAX_TASKS} are taken")
    read: list[_Task] = []
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        path = f"tasks[{index}]"
        key = task.key if task.HasField("key") else str(index)
        if _KEY.fullmatch(key) is None:
            raise InvalidRequest(
                f"{path}.key", "must be 1 to 128 visible ASCII characters (! to ~)"
            )
        if seen.setdefault(key, index) != index:
            raise InvalidRequest(f"{path}.key", f"is {key!r}, as that of tasks[{seen[key]}]")
        name = task.WhichOneof("task")
        if name is None:
            raise InvalidRequest(path, f"holds no task: set one of {', '.join(_KINDS)}")
        read.append(_Task(key, name, getattr(task, name), f"{path}.{name}."))
    return read


async def _run(task: _Task, shared: _Shared) -> tuple[pb.TaskResult, EngineMetrics | None]:
    """One task to its end; its own failure becomes its result."""
    metrics = None
    try:
        response, metrics = await _respond(task, shared)
        result = pb.TaskResult(key=task.key, **{task.name: response})
    except _TellFailed as failed:
        raise failed.error from None
    except Exception as error:
        result = pb.TaskResult(key=task.key, error=_task_error(error, task, shared))
    if shared.tell is not None:
        await shared.tell(task.key, {"task_final": result})
    return result, metrics


class _TellFailed(Exception):
    """An event couldn't be sent: not the task's failure."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _respond(task: _Task, shared: _Shared) -> tuple[Any, EngineMetrics]:
    call = task.call(shared.options)
    stream = await submit(shared.engine, call, shared.image)
    try:
        if shared.tell is not None:
            async for update in stream:
                try:
                    await shared.tell(task.key, skill_event(update))
                except Exception as error:
                    raise _TellFailed(error) from error
        result = await stream.result()
        response = await responded(shared.engine, call, result, _KINDS[task.name].respond)
        response.image_id = shared.image_id
        return response, result.metrics
    finally:
        await stream.aclose()


def _task_error(error: Exception, task: _Task, shared: _Shared) -> pb.TaskError:
    request_id = current_call().request_id
    if not row_of(error).public:
        logger.error("request %s, task %s failed", request_id, task.key, exc_info=error)
    prefix = "request." if shared.tell is not None else ""
    # What the model can't do is a matter of the call's options, not of the task's fields.
    path = prefix if isinstance(error, SkillUnavailable) else prefix + task.path
    told = complaint(error, request_id, path)
    return pb.TaskError(
        code=told.code.value[0],
        message=told.message,
        reason=told.reason,
        field_violations=[
            pb.TaskFieldViolation(field=field, description=description)
            for field, description in told.violations
        ],
    )


def _total(request_id: str, metrics: Sequence[EngineMetrics]) -> EngineResult:
    """What the access log tells of the call: sums of tokens, the longest wait, the first token."""
    total = EngineMetrics(
        input_tokens=sum(m.input_tokens for m in metrics),
        output_tokens=sum(m.output_tokens for m in metrics),
        cached_tokens=sum(m.cached_tokens for m in metrics),
        queue_time_ms=max((m.queue_time_ms for m in metrics), default=0.0),
        ttft_ms=min((m.ttft_ms for m in metrics), default=0.0),
    )
    return EngineResult(request_id=request_id, output={}, finish_reason="stop", metrics=total)
