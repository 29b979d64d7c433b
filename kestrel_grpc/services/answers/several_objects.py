"""Detect and Point with several names (``objects``): each name is a task on the image, as in Analyze."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, overload

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, best_boxes

from ..messages.calls import object_settings, read_tiles
from ..messages.images import required_image
from ..messages.options import call_options
from ..messages.responses import event_fields, timings_of_several
from .analysis import Analysis, Send, Task, run_tasks
from .starting import Starter

MAX_NAMES = 256


@overload
async def find_several(
    starter: Starter, request: pb.PointRequest, send: Send | None = ...
) -> pb.PointResponse: ...
@overload
async def find_several(
    starter: Starter, request: pb.DetectRequest, send: Send | None = ...
) -> pb.DetectResponse: ...
async def find_several(
    starter: Starter, request: pb.PointRequest | pb.DetectRequest, send: Send | None = None
) -> pb.PointResponse | pb.DetectResponse:
    """Finds the objects of all names. ``send`` receives the events of a stream; None sends no events.

    Raises an error if the image, the list of names or a setting is invalid. An error that is about one name only is
    the result of that name.
    """
    _check(request)
    options, source = call_options(request.options), required_image(request)
    done = await run_tasks(
        starter, options, source, _tasks(request), send, event_fields, tiles=read_tiles(request)
    )
    if isinstance(request, pb.PointRequest):
        return pb.PointResponse(**_shared_fields(done))
    if request.HasField("max_overlap"):
        found = [result.detect for result in done.results if result.HasField("detect")]
        await asyncio.to_thread(_suppress, found, request.max_overlap)
    return pb.DetectResponse(**_shared_fields(done))


def _check(request: pb.PointRequest | pb.DetectRequest) -> None:
    """Raises InvalidRequest."""
    names = request.objects
    if request.object:
        raise InvalidRequest("objects", "is set beside object; set only one of them")
    if len(names) > MAX_NAMES:
        raise InvalidRequest("objects", f"has {len(names)} names, the limit is {MAX_NAMES}")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest("objects", f"has {name[:40]!r} twice; name each object once")
        seen.add(name)


def _tasks(request: pb.PointRequest | pb.DetectRequest) -> Sequence[Task]:
    kind: type[pb.PointTask] | type[pb.DetectTask]
    shared: dict[str, Any] = {"sampling": request.sampling}
    shared.update(object_settings(request))
    skill, kind = "detect", pb.DetectTask
    if isinstance(request, pb.PointRequest):
        skill, kind = "point", pb.PointTask
        shared["spatial_refs"] = request.spatial_refs
    return [
        Task(str(index), skill, kind(object=name, **shared), object_path=f"objects[{index}]")
        for index, name in enumerate(request.objects)
    ]


def _shared_fields(done: Analysis) -> dict[str, Any]:
    return {
        "results": done.results,
        "finish_reason": _finish_reason(done.results),
        "usage": done.usage,
        "timings": timings_of_several(done.metrics, done.total_time_ms),
        "model": done.model,
        "request_id": done.request_id,
        "image_size": done.image_size,
        "image_id": done.image_id,
    }


def _suppress(results: Sequence[pb.DetectResponse], max_overlap: float) -> None:
    """Removes boxes until no two of them overlap by more than ``max_overlap``. Names do not matter."""
    boxes = [box for result in results for box in result.objects]
    edges = [(box.x_min, box.y_min, box.x_max, box.y_max) for box in boxes]
    stays = iter(best_boxes(edges, [box.score for box in boxes], max_overlap))
    for result in results:
        kept = [box for box in result.objects if next(stays)]
        if len(kept) < len(result.objects):
            del result.objects[:]
            result.objects.extend(kept)


def _finish_reason(results: Sequence[pb.TaskResult]) -> common_pb2.FinishReason.ValueType:
    """A reason other than STOP, if any name has one."""
    for result in results:
        outcome = result.WhichOneof("outcome")
        if outcome in ("point", "detect"):
            reason: common_pb2.FinishReason.ValueType = getattr(result, outcome).finish_reason
            if reason != common_pb2.FINISH_REASON_STOP:
                return reason
    return common_pb2.FINISH_REASON_STOP
