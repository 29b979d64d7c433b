"""Predictor: a task of Label Studio to regions, with one call of the server for each task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from kestrel_client import (
    AsyncKestrelClient,
    Box,
    DetectTask,
    ImageSize,
    Point,
    PointTask,
    Segment,
    SegmentTask,
    Task,
)

from .images import TaskImages
from .labelling import Control, RequestRefused

MOST_TASKS = 256
_AT_ONCE = 4
"""Tasks that are computed at the same time, over all requests."""
_POINT_WIDTH = 0.75
"""Of a key point as Label Studio draws it, in per cent of the image's width."""
_TASKS = {"rectanglelabels": DetectTask, "keypointlabels": PointTask, "polygonlabels": SegmentTask}


class Predictor:
    def __init__(self, client: AsyncKestrelClient, images: TaskImages) -> None:
        self._client, self._images = client, images
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def version(self) -> str:
        """The name of the served model, with the beginning of its weights' fingerprint. Raises KestrelError."""
        model = await self._client.get_model()
        return f"{model.name}@{model.weights_fingerprint[:8]}"

    async def predict(self, controls: list[Control], tasks: object) -> list[dict[str, Any]]:
        """A prediction for each task, in their order. Raises RequestRefused, KestrelError."""
        if not isinstance(tasks, list) or not tasks:
            raise RequestRefused("tasks: must be a list of tasks")
        if len(tasks) > MOST_TASKS:
            raise RequestRefused(f"tasks: are {len(tasks)}, the limit is {MOST_TASKS}")
        if not controls:
            raise RequestRefused(
                "label_config: has no RectangleLabels, KeyPointLabels or PolygonLabels with a Label and an Image"
            )
        version = await self.version()
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._one(controls, task, f"tasks[{number}]"))
                    for number, task in enumerate(tasks)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [{**each.result(), "model_version": version} for each in asked]

    async def _one(self, controls: list[Control], task: object, name: str) -> dict[str, Any]:
        data = task.get("data") if isinstance(task, dict) else None
        if not isinstance(data, dict):
            raise RequestRefused(f"{name}.data: must be an object")
        by_field: dict[str, list[Control]] = {}
        for control in controls:
            by_field.setdefault(control.image_field, []).append(control)
        regions: list[dict[str, Any]] = []
        async with self._places:
            for field, those in by_field.items():
                image = await self._images.read(data.get(field), f"{name}.data.{field}")
                regions += await self._regions(image, those)
        scores = [region["score"] for region in regions if "score" in region]
        numbered = [{"id": f"kestrel-{i}", **region} for i, region in enumerate(regions)]
        return {"result": numbered, "score": sum(scores) / len(scores) if scores else 0.0}

    async def _regions(self, image: bytes, controls: list[Control]) -> list[dict[str, Any]]:
        names: dict[str, dict[str, None]] = {}
        for control in controls:
            names.setdefault(control.kind, {}).update((name, None) for name, _ in control.labels)
        tasks: dict[str, Task] = {kind: _TASKS[kind](list(each)) for kind, each in names.items()}
        answered = await self._client.analyze(image, tasks)
        found: dict[tuple[str, str], list[Any]] = {}
        for kind in tasks:
            for error in answered[kind].errors.values():
                raise error
            for each in answered[kind]:
                found.setdefault((kind, each.label), []).append(each)
        return [
            region
            for control in controls
            for name, label in control.labels
            for each in found.get((control.kind, name), ())
            for region in _labelled(control, label, each, answered.image_size)
        ]


def _labelled(
    control: Control, label: str, found: Any, size: ImageSize
) -> Iterator[dict[str, Any]]:
    """The regions of what was found. An outline may have several."""
    for value in _values(found, size):
        yield {
            "from_name": control.from_name,
            "to_name": control.to_name,
            "type": control.kind,
            "original_width": size.width,
            "original_height": size.height,
            "image_rotation": 0,
            "value": {**value, control.kind: [label]},
            "score": found.score,
        }


def _values(found: Any, size: ImageSize) -> Iterator[dict[str, Any]]:
    """A place as Label Studio has it, in per cent of the image's sides."""
    match found:
        case Segment():
            from kestrel_client.drawing import paint

            for polygon in paint.corners(found.outline, size):
                corners = [[100 * x / size.width, 100 * y / size.height] for x, y in polygon]
                yield {"points": corners, "closed": True}
        case Box():
            corner = {"x": 100 * found.x_min, "y": 100 * found.y_min, "rotation": 0}
            yield {**corner, "width": 100 * found.width, "height": 100 * found.height}
        case Point():
            yield {"x": 100 * found.x, "y": 100 * found.y, "width": _POINT_WIDTH}
