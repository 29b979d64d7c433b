"""COCO: the boxes of objects by name, by COCO's average precision and by F1.

Rows: ``objects``, a list of objects with ``bbox`` (x, y, width, height in pixels) and ``label`` (a name), perhaps
``iscrowd`` and ``area``; perhaps ``width`` and ``height`` of the image, and ``absent``, names of what it does not show.
The model is asked for the names that an image has, and with --absent for others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...files import json_file
from ...parser import CommandError
from ..benchmark import Asking, Benchmark, Case, Outcome, Score, SetMetrics
from ..place_metrics import found_boxes, matched, size_of, to_pixels
from ..reading import image_file, objects_of
from ..records import Edges, Record
from ..scored import AnsweredCase

_FILES = (
    "annotations/instances_val*.json",
    "instances_*.json",
    "annotations.json",
    "_annotations.coco.json",
)


class _Truth(NamedTuple):
    """The boxes of one name in an image, in pixels of ``frame``, its size; None for the size of the file. ``crowds``:
    boxes of groups, which count neither way."""

    name: str
    frame: tuple[float, float] | None
    boxes: list[Edges]
    areas: list[float]
    crowds: list[Edges]


def _cases(record: Record, asking: Asking) -> list[Case]:
    frame = None
    if record.has("width"):
        frame = record.number_of("width", 1), record.number_of("height", 1)
    truths: dict[str, _Truth] = {}
    for each in map(record.within, record.rows("objects")):
        name, edges = each.text("label"), each.box("bbox")
        area = each.number_of("area") if each.has("area") else _area(edges)
        truth = truths.setdefault(name, _Truth(name, frame, [], [], []))
        if each.values.get("iscrowd"):
            truth.crowds.append(edges)
        else:
            truth.boxes.append(edges)
            truth.areas.append(area)
    others = record.values.get("absent") or []
    if not isinstance(others, list):
        record.refuse("absent", others, "a list of names")
    others = sorted({str(name) for name in others} - truths.keys())
    rng = random.Random(f"{record.image}/{record.number}")  # The same for every run.
    absent = sorted(rng.sample(others, min(asking.absent, len(others))))
    found = [each for each in truths.values() if each.boxes]
    found += [_Truth(name, frame, [], [], []) for name in absent]
    return [
        Case(
            task=asking.find("detect", truth.name),
            truth=truth,
            question=truth.name,
            expected=f"{len(truth.boxes)} in the image",
        )
        for truth in found
    ]


def _score(case: Case, outcome: Outcome | None) -> Score:
    truth: _Truth = case.truth
    found = [] if outcome is None else [box for box, _ in found_boxes(outcome)]
    boxes = [to_pixels(box, _frame(truth, outcome)) for box in found]
    ious = matched(truth.boxes, boxes)
    wanted = len(boxes) + len(truth.boxes)
    value = 2 * len(ious) / wanted if wanted else float(outcome is not None)
    counts = {
        "F1 at IoU 0.5": (2.0 * len(ious), float(wanted)),
        "mean IoU of matches": (sum(ious), float(len(ious))),
    }
    if not truth.boxes:
        counts["absent: nothing found"] = (float(not boxes and outcome is not None), 1.0)
    return Score(value, counts, f"{len(boxes)} found, {len(ious)} right")


def _whole(answered: Sequence[AnsweredCase]) -> SetMetrics | None:
    """COCO's own figures, by faster-coco-eval."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        return SetMetrics(
            {}, "average precision needs faster-coco-eval: pip install './clients/python[cli,eval]'"
        )
    images: dict[str, int] = {}
    names: dict[str, int] = {}
    truths: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for each in answered:
        truth: _Truth = each.case.truth
        place = {
            "image_id": images.setdefault(each.item.image, len(images) + 1),
            "category_id": names.setdefault(truth.name, len(names) + 1),
        }
        areas = [*truth.areas, *(_area(box) for box in truth.crowds)]
        for i, box in enumerate((*truth.boxes, *truth.crowds)):
            crowd = int(i >= len(truth.boxes))
            own = {"id": len(truths) + 1, "bbox": _corner(box), "area": areas[i], "iscrowd": crowd}
            truths.append({**place, **own})
        if each.outcome is not None:
            frame = _frame(truth, each.outcome)
            for box, score in found_boxes(each.outcome):
                found.append({**place, "bbox": _corner(to_pixels(box, frame)), "score": score})
    if not truths:
        return None
    note = (
        "Average precision counts the names that were asked: those of each image, and those of --absent. COCO's own "
        "figures ask for all 80 names in every image (--absent 80)."
    )
    metrics = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large")
    if not found:
        return SetMetrics(dict.fromkeys(metrics[:3], 0.0), note)
    labels = COCO(
        {
            "images": [{"id": number} for number in images.values()],
            "annotations": truths,
            "categories": [{"id": number, "name": name} for name, number in names.items()],
        }
    )
    evaluation = COCOeval_faster(labels, labels.loadRes(found), iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    values = [float(value) for value in evaluation.stats[: len(metrics)]]
    return SetMetrics({m: v for m, v in zip(metrics, values, strict=True) if v >= 0}, note)


def _frame(truth: _Truth, outcome: Outcome | None) -> tuple[float, float]:
    """The size of the image in the coordinates of the truth."""
    return truth.frame or size_of(outcome or {})


def _corner(box: Edges) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _area(box: Edges) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``annotations/instances_val2017.json`` (or another), with the images in ``val2017``; or one file of annotations
    beside the images."""
    for pattern in _FILES:
        for file in sorted(folder.glob(pattern)):
            return _rows(folder, file)
    return None


def _rows(folder: Path, file: Path) -> Iterator[dict[str, Any]]:
    whole = json_file(file)
    names = {each.get("id"): each.get("name") for each in objects_of(whole, file, "categories")}
    objects: dict[Any, list[dict[str, Any]]] = {}
    for each in objects_of(whole, file, "annotations"):
        if each.get("category_id") not in names:
            raise CommandError(
                f"{str(file)!r}: an annotation has the unknown category_id {each.get('category_id')!r}"
            )
        own = {"label": names[each["category_id"]], **each}
        objects.setdefault(each.get("image_id"), []).append(own)
    part = file.stem.removeprefix("instances_")
    for image in objects_of(whole, file, "images"):
        others = (
            image.get("neg_category_ids") or names
        )  # LVIS labels some names only in each image.
        path = image_file(folder, image.get("file_name"), part, "images")
        yield {
            "image": str(Path(path).relative_to(folder)),
            "objects": objects.get(image.get("id"), []),
            "absent": [names[number] for number in others if number in names],
            "width": image.get("width"),
            "height": image.get("height"),
        }


BENCHMARK = Benchmark(
    name="coco",
    title="COCO",
    source="https://arxiv.org/abs/1405.0312",
    skills=("detect",),
    cases=_cases,
    score=_score,
    layout=_layout,
    whole=_whole,
)
