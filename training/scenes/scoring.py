"""Scores of single tasks against the scene's truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_client.commands.evaluation.place_metrics import matched
from training.scenes.captions import named_objects, objects_of
from training.scenes.evaluation_set import Task
from training.scenes.paths import outline, path_polygon, polygon_iou
from training.scenes.scenes import Box, Scene, Shape

Record = dict[str, Any]


def inside(polygon: NDArray[np.float64], x: float, y: float) -> bool:
    """Whether a point lies in a polygon [n, 2]."""
    x0, y0 = polygon[:, 0], polygon[:, 1]
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    crosses = (y0 > y) != (y1 > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = (x1 - x0) * (y - y0) / (y1 - y0) + x0
    return bool(np.count_nonzero(crosses & (x < at)) % 2)


def _point_hits(scene: Scene, targets: Iterable[int], points: list[tuple[float, float]]) -> int:
    """How many targets have a point of their own inside them."""
    left = {i: outline(scene.shapes[i]) for i in targets}
    hits = 0
    for x, y in points:
        hit = next(
            (i for i, p in left.items() if inside(p, x * scene.width, y * scene.height)), None
        )
        if hit is not None:
            del left[hit]
            hits += 1
    return hits


def _pixel_box(scene: Scene, box: Mapping[str, float]) -> Box:
    w, h = scene.width, scene.height
    return box["x_min"] * w, box["y_min"] * h, box["x_max"] * w, box["y_max"] * h


def segment_iou(scene: Scene, shape: Shape, segments: Sequence[Mapping[str, Any]]) -> float:
    """The IoU of the first segment's path with the outline of ``shape``; 0 without a path or a box."""
    found = segments[0] if segments else {}
    if not found.get("svg_path") or not found.get("bbox"):
        return 0.0
    polygon = path_polygon(found["svg_path"], _pixel_box(scene, found["bbox"]))
    return 0.0 if polygon is None else polygon_iou(polygon, outline(shape))


def score(scene: Scene, task: Task, output: Mapping[str, Any]) -> Record:
    """Whether the result is right ("ok"), and the numbers that the table needs: targets, hits, found, ious, iou."""
    targets = set(task.targets)
    record: Record = {"targets": len(targets)}
    if task.kind == "absent":
        segments = output.get("segments", [])
        nothing = not output.get("points") and not output.get("objects")
        record["ok"] = nothing and not any(s.get("svg_path") or s.get("bbox") for s in segments)
    elif task.skill in ("query", "reasoning"):
        record["ok"] = output["answer"].strip() == task.answer
        if task.skill == "reasoning":
            grounding = output.get("reasoning", {}).get("grounding", [])
            points = [(float(p[0]), float(p[1])) for chunk in grounding for p in chunk["points"]]
            record["hits"], record["found"] = _point_hits(scene, targets, points), len(points)
    elif task.skill == "caption":
        record["ok"] = named_objects(output["caption"]) == objects_of(scene)
    elif task.skill == "point":
        points = [(p["x"], p["y"]) for p in output["points"]]
        record["hits"], record["found"] = _point_hits(scene, targets, points), len(points)
        record["ok"] = record["hits"] == record["found"] == len(targets)
    elif task.skill == "detect":
        found = [_pixel_box(scene, b) for b in output["objects"]]
        ious = matched([scene.shapes[i].box for i in task.targets], found)
        record["ious"], record["found"] = ious, len(found)
        record["ok"] = len(ious) == len(found) == len(targets)
    else:
        record["iou"] = segment_iou(scene, scene.shapes[task.targets[0]], output["segments"])
        record["ok"] = record["iou"] >= 0.5
    return record
