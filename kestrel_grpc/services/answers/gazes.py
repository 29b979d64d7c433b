"""The gazes of one task: of its eyes, of its faces, or of every face that the model finds."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import NUM_LOOKS, EngineResult, FieldPath, Request, eyes_in, mean_gaze

from ...edge.messages.fields import located
from ..messages.responses import FINISH_REASONS, NameResult, set_box
from ..messages.tasks import EDGES, MAX_GAZES, Edges, Point, centre_of, edges_of, gaze_request
from .several import MAX_SEQUENCES, PartResult, all_of, few_at_once, total_result

if TYPE_CHECKING:
    from .kinds import CallTask
    from .run import Run

Part: TypeAlias = pb.Gaze | NameResult
"""A gaze, or the faces that the model found."""

_Look: TypeAlias = tuple[Point, bool, Sequence[Any]]
"""An eye as the image shows it, whether the image is mirrored, and the images."""

_ACCURATE_AT_ONCE = 2 + MAX_SEQUENCES // (2 * NUM_LOOKS)
"""Accurate gazes of one task in progress: enough that a gaze that ends leaves no sequence unused."""


class _Person(NamedTuple):
    """Whose gaze to find. ``path``: of the eye or the face in the task. ``face``: None if the task gives the eye."""

    request: Request
    path: FieldPath
    face: Edges | None


def has_more_requests(task: pb.GazeTask) -> bool:
    """Whether more requests about the image follow those that are known from the task."""
    return task.accurate or not task.eyes


def num_looks(task: pb.GazeTask) -> int:
    """For each face of the task."""
    return 2 * NUM_LOOKS if task.accurate and task.faces else 1


def gaze_part(result: EngineResult, label: str) -> pb.Gaze:
    """The gaze without eye and face."""
    gaze = pb.Gaze(absence=result.absence, finish_reason=FINISH_REASONS[result.finish_reason])
    found = result.output["gaze"]
    if found is not None:
        gaze.target.x, gaze.target.y, gaze.score = found["x"], found["y"], found.get("score", 0.0)
    return gaze


def gaze_response(result: EngineResult | None, parts: Sequence[Part]) -> pb.GazeResponse:
    return pb.GazeResponse(
        gazes=[part for part in parts if isinstance(part, pb.Gaze)],
        search=next((part.search for part in parts if isinstance(part, NameResult)), None),
    )


async def of_gazes(
    run: Run,
    task: CallTask[Any, Any],
    finding: CallTask[Any, Any],
    requests: Sequence[Request],
    images: Sequence[Any],
) -> list[PartResult[Part]]:
    """``requests``: one for each eye or face of the task, or the one of the task ``finding``, which finds faces. The
    first that fails ends the others."""
    message: pb.GazeTask = task.message
    ended: list[PartResult[Part]] = []
    faces: list[Edges | None] = [*map(edges_of, message.faces)]
    if message.eyes:
        faces = [None] * len(requests)
    elif not faces:
        if message.accurate and images[0].features is not None:
            await run.images.mirrored()  # It is refused, also if the image shows no face.
        found = await run.ended(finding, requests[0], images)
        assert found.result is not None, "it would have raised"
        ended.append(found)
        faces = [edges_of(each.box) for each in found.part.detections[:MAX_GAZES]]
        requests = [
            gaze_request(message, _model_centre(each), seed=requests[0].settings["seed"])
            for each in found.result.output["objects"][:MAX_GAZES]
        ]
    field = "eyes" if message.eyes else "faces"
    persons = [
        _Person(request, (field, index), face)
        for index, (request, face) in enumerate(zip(requests, faces, strict=True))
    ]
    if not persons:
        return ended
    if not message.accurate:
        gazes = (_once(run, task, person, images) for person in persons)
        return ended + await few_at_once(gazes, min(MAX_SEQUENCES, len(persons)))
    mirrored, random = await run.images.mirrored(), Random(requests[0].settings["seed"])
    often = (_often(run, task, person, images, mirrored, random) for person in persons)
    return ended + await few_at_once(often, min(_ACCURATE_AT_ONCE, len(persons)))


async def _once(
    run: Run, task: CallTask[Any, Any], person: _Person, images: Sequence[Any]
) -> PartResult[Part]:
    ended = await _ended(run, task, person, person.request, images)
    await _tell(run, task, person, ended.part)
    return ended


def _often(
    run: Run,
    task: CallTask[Any, Any],
    person: _Person,
    upright: Sequence[Any],
    mirrored: Sequence[Any],
    random: Random,
) -> Coroutine[Any, Any, PartResult[Part]]:
    """An accurate gaze. The eyes are drawn at once: the order of the persons decides them."""
    box = _part_of(person.face, run.images.region)
    seen = [((x, y), False, upright) for x, y in eyes_in(box, random)]
    seen += [((1 - x, y), True, mirrored) for x, y in eyes_in(box, random)]
    return _mean(run, task, person, seen)


async def _mean(
    run: Run, task: CallTask[Any, Any], person: _Person, seen: Sequence[_Look]
) -> PartResult[Part]:
    """One gaze from several looks, with the sum of their results."""
    every = await all_of(
        [
            _ended(run, task, person, replace(person.request, arguments={"eye": eye}), images)
            for eye, _, images in seen
        ]
    )
    points: list[Point] = []
    results: list[EngineResult] = []
    for (_, is_mirrored, _), each in zip(seen, every, strict=True):
        assert each.result is not None, "it would have raised"
        results.append(each.result)
        if (found := each.result.output["gaze"]) is not None:
            points.append((1 - found["x"] if is_mirrored else found["x"], found["y"]))
    parts: list[pb.Gaze] = [each.part for each in every]
    absences = [part.absence for part in parts if part.HasField("absence")]
    gaze = pb.Gaze(
        absence=fmean(absences) if absences else None,
        finish_reason=max(part.finish_reason for part in parts),
    )
    if (target := mean_gaze(points)) is not None:
        gaze.target.x, gaze.target.y = target
        gaze.score = fmean(part.score for part in parts if part.HasField("target"))
    await _tell(run, task, person, gaze)
    total = total_result("", [result.metrics for result in results])
    return PartResult(gaze, replace(results[0], metrics=total.metrics, num_looks=len(results)))


async def _ended(
    run: Run, task: CallTask[Any, Any], person: _Person, request: Request, images: Sequence[Any]
) -> PartResult[Any]:
    with located(lambda path: person.path if path == ("eye",) else path):
        return await run.ended(task, request, images)


async def _tell(run: Run, task: CallTask[Any, Any], person: _Person, gaze: pb.Gaze) -> None:
    """Completes a gaze, and sends its event."""
    gaze.eye.x, gaze.eye.y = person.request.arguments["eye"]
    if person.face is not None:
        set_box(gaze.face, dict(zip(EDGES, person.face, strict=True)))
    await run.send(task, {"gaze": gaze})


def _model_centre(box: Mapping[str, float]) -> Point:
    """The centre of a box as the model found it, which may exceed the image, in the precision of the response: a task
    with this eye then gives the same gaze."""
    x, y = centre_of((box["x_min"], box["y_min"], box["x_max"], box["y_max"]))
    eye = common_pb2.Point(x=x, y=y)
    return eye.x, eye.y


def _part_of(face: Edges | None, region: Edges | None) -> Edges:
    """The part of a face that requests can see."""
    assert face is not None, "a task with eyes is not accurate"
    x_min, y_min, x_max, y_max = region or (0.0, 0.0, 1.0, 1.0)
    return max(face[0], x_min), max(face[1], y_min), min(face[2], x_max), min(face[3], y_max)
