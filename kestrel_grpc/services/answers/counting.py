"""CountTokens: what the prompts of tasks take of the model's context, and the images of its tower, before they run.

Each task becomes the same requests of the engine as in its method. The engine makes their prompts and submits none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, MeasuredImage, Request, SeenImage, Tiles

from ...edge.messages.fields import located
from ...images.request_images import images_of
from .analysis import read_tasks
from .kinds import CallTask
from .run import Run


class _Prompts(NamedTuple):
    """``number`` prompts of ``positions`` each, with ``num_images`` images. ``system``: positions of system text in
    each."""

    number: int
    positions: int
    num_images: int
    system: int = 0


async def count_tokens(run: Run, request: pb.CountTokensRequest) -> pb.CountTokensResponse:
    """Raises the error of the first task that is invalid."""
    tasks = read_tasks(request)
    await run.images.find(images_of(request))
    images = await _measured(run, None)
    seen = [SeenImage(size=each.size, digest="", num_crops=sum(each.crops)) for each in images]
    await run.accept(seen)
    counts = [await _count(run, task, images) for task in tasks]
    info = run.engine.info
    return pb.CountTokensResponse(
        tasks=counts,
        images=[
            pb.ImageTokens(
                size=common_pb2.ImageSize(width=image.size[0], height=image.size[1]),
                positions=info.image_positions,
                num_crops=sum(image.crops),
            )
            for image in images
        ],
        input_tokens=sum(each.input_tokens for each in counts),
        image_tokens=sum(each.image_tokens for each in counts),
        context_positions=info.max_context,
        info=run.info(),
    )


async def _measured(run: Run, tiles: Tiles | None) -> list[MeasuredImage]:
    with located(run.images.path_of):
        return await run.images.measured(tiles)


async def _count(run: Run, task: CallTask[Any, Any], images: list[MeasuredImage]) -> pb.TaskTokens:
    """``images``: as tasks without tiles see them."""
    tiles, requests = run.requests_of(task)
    if tiles is not None:
        images = await _measured(run, tiles)
    count = task.kind.num_looks(task.message) * (len(images[0].crops) if images else 1)
    if task.kind.are_samples:  # The requests are equal.
        count, requests = count * len(requests), requests[:1]
    prompts: list[_Prompts] = []
    for index, request in enumerate(requests):
        with located(_at(run, task, index)):
            prompts += await _prompts(run, request, count, tiles)
    image_positions, context = run.engine.info.image_positions, run.engine.info.max_context
    longest = max(each.positions for each in prompts)
    return pb.TaskTokens(
        key=task.key,
        num_prompts=sum(each.number for each in prompts),
        input_tokens=sum(each.number * each.positions for each in prompts),
        image_tokens=image_positions * sum(each.number * each.num_images for each in prompts),
        system_tokens=sum(each.number * each.system for each in prompts),
        longest_prompt_tokens=longest,
        room_tokens=max(0, context - longest),
        num_crops=sum(sum(image.crops) for image in images),
    )


async def _prompts(
    run: Run, request: Request, count: int, tiles: Tiles | None
) -> Sequence[_Prompts]:
    """The prompts of ``count`` equal requests, and of the looks for the objects that all of them presuppose."""
    images = await run.images.of_task(tiles)
    positions, system = await _positions(run, request, images), 0
    if request.arguments.get("system"):
        others = {k: v for k, v in request.arguments.items() if k != "system"}
        system = positions - await _positions(run, replace(request, arguments=others), images)
    found = [_Prompts(count, positions, len(images), system)]
    for name in request.arguments.get("presupposes") or ():
        look = Request(skill="point", arguments={"object": name})
        found.append(_Prompts(len(images), await _positions(run, look, images[:1]), 1))
    return found


async def _positions(run: Run, request: Request, images: Sequence[Any]) -> int:
    await asyncio.sleep(0)  # A call may have thousands of names.
    count: int = await run.engine.count_positions(run.whole(request, images))
    return count


def _at(run: Run, task: CallTask[Any, Any], index: int) -> Callable[[FieldPath], FieldPath]:
    def path_of(path: FieldPath) -> FieldPath:
        found = run.path_of(task, path, index)
        return ("images", 0, *found[1:]) if found[:1] == ("image",) else found

    return path_of
