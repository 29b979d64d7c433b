"""Analyze: several tasks on one image, each of which fails alone. The tasks of a frame run in the same way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, FieldPath, InvalidRequest, clock

from ...edge.calls.current import current
from ...edge.failures.endings import forget_frames
from ...images.request_images import images_of
from ..messages.responses import set_usage, timings_of_several
from .kinds import KINDS, CallTask
from .run import Run
from .several import all_of, total_result

MAX_TASKS = 32

_KEY = re.compile(r"[!-~]{1,128}")


async def analyze(run: Run, request: pb.AnalyzeRequest) -> pb.AnalyzeResponse:
    """Answers a call of Analyze. Raises an error if the image, the options or the list of tasks is invalid."""
    tasks = read_tasks(request)
    await run.images.find(images_of(request))
    await run.prepare()
    return await run_tasks(run, tasks)


async def run_tasks(run: Run, tasks: Sequence[CallTask[Any, Any]]) -> pb.AnalyzeResponse:
    """The results of all tasks. Cancellation ends all of them."""
    call = current.get()
    done = await all_of([_run(run, task) for task in tasks])
    results = [result for _, of_task in done for result in of_task]
    call.result = total_result(call.request_id, [result.metrics for result in results])
    metrics = call.result.metrics
    response = pb.AnalyzeResponse(
        results=[result for result, _ in done],
        timings=timings_of_several(metrics, 1e3 * (clock.now() - run.began)),
        info=run.info(),
    )
    set_usage(response.usage, metrics)
    return response


def read_tasks(
    request: pb.AnalyzeRequest | pb.CountTokensRequest | pb.StreamFramesRequest,
) -> list[CallTask[Any, Any]]:
    """The tasks of a request, or of the config of a stream. Raises InvalidRequest if their number or a key is invalid,
    or if a task is empty."""
    root: FieldPath
    if isinstance(request, pb.StreamFramesRequest):
        root, tasks = ("config", "tasks"), request.config.tasks
    else:
        root, tasks = ("tasks",), request.tasks
    if not 1 <= len(tasks) <= MAX_TASKS:
        raise InvalidRequest(root, f"has {len(tasks)} tasks; must have 1 to {MAX_TASKS}")
    read: list[CallTask[Any, Any]] = []
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        path = (*root, index)
        key = task.key if task.HasField("key") else str(index)
        if _KEY.fullmatch(key) is None:
            raise InvalidRequest(
                (*path, "key"), "must be 1 to 128 visible ASCII characters (! to ~)"
            )
        if seen.setdefault(key, index) != index:
            raise InvalidRequest(
                (*path, "key"), f"{key!r} is already the key of tasks[{seen[key]}]"
            )
        name = task.WhichOneof("task")
        if name is None:
            raise InvalidRequest(path, f"holds no task: set one of {', '.join(KINDS)}")
        read.append(CallTask(KINDS[name], getattr(task, name), (*path, name), key))
    return read


async def _run(run: Run, task: CallTask[Any, Any]) -> tuple[pb.TaskResult, list[EngineResult]]:
    """Runs one task. The task's failure becomes its result."""
    results: list[EngineResult] = []
    try:
        response, results = await run.answer(task)
        message = pb.TaskResult(key=task.key, **{task.kind.name: response})
    except Exception as error:
        if not run.is_of_task(error):
            raise
        message = pb.TaskResult(key=task.key, error=run.status(error, task))
        forget_frames(error)  # They hold the image.
    await run.send(task, {"task_final": message})
    return message, results
