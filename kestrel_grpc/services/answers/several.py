"""The requests of one call that answer it together: of several names, or of several samples of one question.

Owns how many of them may wait or run at a time, that all end together, their seeds, and the sum of their results.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    EngineMetrics,
    EngineResult,
    EngineStream,
    InferenceEngine,
    Request,
    RequestError,
)

from ...edge.failures.endings import forget_frames
from ..messages.responses import NameResult
from ..messages.tasks import label_of

if TYPE_CHECKING:
    from .kinds import CallTask, Kind, Response
    from .run import Run

T = TypeVar("T")
Part = TypeVar("Part")

MAX_SEQUENCES = 32
"""Most sequences of one call that wait or run at a time. A tiled request has one for each look."""

_SEEDS = 2**63


class PartResult(NamedTuple, Generic[Part]):
    """A request that has ended."""

    part: Part
    result: EngineResult | None
    """None if it failed."""
    task_fault: RequestError | None = None
    """The error of one name, if it is in a field that all names share."""


async def of_names(
    run: Run, task: CallTask[Part, Response], requests: Sequence[Request], images: Sequence[Any]
) -> list[PartResult[Part]]:
    """The requests of several names, each of which fails alone. Raises an error that is in a field of the task, if
    all fail with such errors."""
    named = (_named(run, task, index, each, images) for index, each in enumerate(requests))
    ended = await few_at_once(named, min(MAX_SEQUENCES, len(requests)))
    faults = [each.task_fault for each in ended if each.task_fault is not None]
    if len(faults) == len(ended):
        raise faults[0]
    return ended


async def _named(
    run: Run, task: CallTask[Any, Any], index: int, request: Request, images: Sequence[Any]
) -> PartResult[Any]:
    try:
        return await run.ended(task, request, images)
    except Exception as error:
        if not run.is_of_task(error):
            raise
        failure, fault = error, None
        if isinstance(error, RequestError):
            failure = error.at(run.path_of(task, error.path, index))
            fault = None if error.path == ("object",) else error
        search = pb.ObjectSearch(object=label_of(request), error=run.status(failure, task))
        forget_frames(error)  # They hold the image, and this frame holds the error.
        await run.send(task, {"search": search})
        return PartResult(NameResult([], search), None, fault)


async def of_samples(
    run: Run, task: CallTask[Part, Response], requests: Sequence[Request], images: Sequence[Any]
) -> list[PartResult[Part]]:
    """The requests of several samples. The first that fails ends the others. The first sample looks for the objects
    that the question presupposes, for all of them."""
    first, *others = requests
    if "presupposes" not in first.arguments:
        return await all_of([run.ended(task, each, images) for each in requests])
    looked = asyncio.Event()
    abstained: list[EngineResult] = []

    async def note(stream: EngineStream) -> None:
        if stream.done and (result := await stream.result()).abstained:
            abstained.append(result)
        looked.set()

    async def later(request: Request) -> PartResult[Part]:
        await looked.wait()
        if abstained:
            same = replace(abstained[0], seed=request.settings["seed"])
            return PartResult(task.kind.part(same, label_of(request)), None)
        return await run.ended(task, request, images)

    arguments = {k: value for k, value in first.arguments.items() if k != "presupposes"}
    rest = [later(replace(each, arguments=arguments)) for each in others]
    return await all_of([run.ended(task, first, images, note), *rest])


def seeded(
    engine: InferenceEngine, kind: Kind[Any, Any], requests: Sequence[Request]
) -> list[Request]:
    """Several requests with their seeds: one for all names, or seeds in a row for samples."""
    step = 1 if kind.are_samples else 0
    seed = requests[0].settings.get("seed")
    if seed is None:
        seed = engine.draw_seed(1 + step * (len(requests) - 1))
    # The engine refuses a seed below 0.
    seeds = [(seed + step * i) % _SEEDS if seed >= 0 else seed for i in range(len(requests))]
    return [
        replace(each, settings={**each.settings, "seed": own})
        for each, own in zip(requests, seeds, strict=True)
    ]


class SequenceTurns:
    """Turns for ``most`` sequences of one call at a time, in the order in which they are asked for."""

    def __init__(self, most: int) -> None:
        self._free, self._taking = asyncio.Semaphore(most), asyncio.Lock()

    @asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[None]:
        """A context in which ``count`` more sequences may wait or run."""
        taken = 0
        try:
            async with self._taking:
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


async def all_of(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all runs. If one raises, or the call is cancelled, all end.

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


async def few_at_once(runs: Iterable[Coroutine[Any, Any, T]], most: int) -> list[T]:
    """As ``all_of``, but takes a run from ``runs`` when fewer than ``most`` are in progress: many runs that would only
    wait for turns hold memory, and making them holds up the event loop."""
    numbered = enumerate(runs)

    async def take_runs() -> list[tuple[int, T]]:
        return [(index, await run) for index, run in numbered]

    done = itertools.chain.from_iterable(await all_of([take_runs() for _ in range(most)]))
    return [result for _, result in sorted(done, key=lambda each: each[0])]


def total_result(request_id: str, metrics: Sequence[EngineMetrics]) -> EngineResult:
    """Returns the sums of tokens, the longest queue time and the earliest first token."""
    total = EngineMetrics(
        **EngineMetrics.work_of(metrics),
        queue_time_ms=max((m.queue_time_ms for m in metrics), default=0.0),
        ttft_ms=min((m.ttft_ms for m in metrics), default=0.0),
    )
    return EngineResult(request_id=request_id, output={}, finish_reason="stop", metrics=total)
