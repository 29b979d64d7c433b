"""COCO: the boxes of objects by name, by COCO's average precision and by F1.

Rows: ``objects`` with lists ``bbox`` (x, y, width, height in pixels) and ``label`` (name, or id of COCO's categories),
perhaps ``iscrowd`` and ``area``; perhaps ``width`` and ``height`` of the image, and ``absent``, names of what it does
not show. The model is asked for the names that an image has, and with --absent for others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...files import json_file
from ...parser import CommandError
from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score, SetMetrics
from ..place_metrics import found_boxes, matched, size_of, to_pixels
from ..reading import image_file, objects_of
from ..records import Edges, Record, is_number, is_unicode
from ..scored import AnsweredCase

_ALL = (
    "person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|street sign|stop sign|"
    "parking meter|bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|hat|backpack|umbrella|shoe|"
    "eye glasses|handbag|tie|suitcase|frisbee|skis|snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|"
    "surfboard|tennis racket|bottle|plate|wine glass|cup|fork|knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|"
    "carrot|hot dog|pizza|donut|cake|chair|couch|potted plant|bed|mirror|dining table|window|desk|toilet|door|tv|"
    "laptop|mouse|remote|keyboard|cell phone|microwave|oven|toaster|sink|refrigerator|blender|book|clock|vase|scissors|"
    "teddy bear|hair drier|toothbrush|hair brush"
).split("|")
_UNLABELLED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91)
"""Ids that COCO's own files have no boxes of."""
_FILES = (
    "annotations/instances_val*.json",
    "instances_*.json",
    "annotations.json",
    "_annotations.coco.json",
)
CATEGORIES = dict(enumerate(_ALL, 1))
"""COCO's categories by their ids, https://cocodataset.org."""


_LABELLED = [name for number, name in CATEGORIES.items() if number not in _UNLABELLED]


class _Truth(NamedTuple):
    """The boxes of one name in an image, in pixels. ``crowds``: boxes of groups, which count neither way."""

    name: str
    boxes: list[Edges]
    areas: list[float]
    crowds: list[Edges]


def _cases(record: Record, asking: Asking) -> list[Case]:
    truths = {truth.name: truth for truth in _truths(record)}
    others = record.texts("absent") if record.values.get("absent") else _LABELLED
    others = [name for name in others if name not in truths]
    rng = random.Random(f"{record.image}/{record.number}")  # The same for every run.
    absent = sorted(rng.sample(others, min(asking.absent, len(others))))
    names = [each for each in truths.values() if each.boxes]
    frame = (record.integer("width"), record.integer("height")) if record.has("width") else None
    if frame is not None and min(frame) < 1:
        record.refuse("width and height", frame, "at least 1")
    names += [_Truth(name, [], [], []) for name in absent]
    return [_case(each, frame, asking) for each in names]


def _case(truth: _Truth, frame: tuple[int, int] | None, asking: Asking) -> Case:
    return Case(
        task=asking.detect(truth.name),
        truth=truth,
        question=truth.name,
        expected=f"{len(truth.boxes)} in the image",
        boxes=truth.boxes,
        frame=frame,
    )


def _truths(record: Record) -> list[_Truth]:
    objects = record.value("objects")
    if isinstance(objects, str):
        try:
            objects = json.loads(objects)
        except ValueError:
            record.refuse("objects", objects, "JSON")
    if not isinstance(objects, dict):
        record.refuse("objects", objects, "lists bbox and label")
    inner = Record(record.place, record.number, objects, record.image, record.load)
    boxes, labels = inner.value("bbox"), inner.value("label", "category")
    if not isinstance(boxes, list) or not isinstance(labels, list) or len(boxes) != len(labels):
        record.refuse("objects", objects, "lists bbox and label of the same length")
    crowds = _beside(record, objects, "iscrowd", len(boxes))
    areas = _beside(record, objects, "area", len(boxes))
    found: dict[str, _Truth] = {}
    for box, label, crowd, area in zip(boxes, labels, crowds, areas, strict=True):
        own = Record(record.place, record.number, {"bbox": box}, record.image, record.load)
        edges = own.box("bbox")
        name = CATEGORIES.get(label) if isinstance(label, int) else label
        if not isinstance(name, str) or not is_unicode(name):
            record.refuse("label", label, "a name or the id of a category of COCO")
        if area is not None and (not is_number(area) or area < 0):
            record.refuse("area", area, "a number of at least 0")
        truth = found.setdefault(name, _Truth(name, [], [], []))
        if crowd:
            truth.crowds.append(edges)
        else:
            truth.boxes.append(edges)
            truth.areas.append(_area(edges) if area is None else float(area))
    return list(found.values())


def _beside(record: Record, objects: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """A value of each box; None where there is none."""
    values = objects.get(name) or [None] * count
    if not isinstance(values, list) or len(values) != count:
        record.refuse(name, values, f"a list of {count}, one for each box")
    return values


def _score(case: Case, outcome: Outcome | None) -> Score:
    truth: _Truth = case.truth
    found = [] if outcome is None else [box for box, _ in found_boxes(outcome)]
    boxes = [to_pixels(box, _frame(case, outcome)) for box in found]
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
            frame = _frame(each.case, each.outcome)
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


def _frame(case: Case, outcome: Outcome | None) -> tuple[float, float]:
    """The size of the image in the coordinates of the truth."""
    return case.frame or size_of(outcome or {})


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
    objects: dict[Any, dict[str, list[Any]]] = {}
    for each in objects_of(whole, file, "annotations"):
        if each.get("category_id") not in names:
            raise CommandError(
                f"{str(file)!r}: an annotation has the unknown category_id {each.get('category_id')!r}"
            )
        own = objects.setdefault(
            each.get("image_id"), {"bbox": [], "label": [], "iscrowd": [], "area": []}
        )
        own["bbox"].append(each.get("bbox"))
        own["label"].append(names[each["category_id"]])
        own["iscrowd"].append(each.get("iscrowd", 0))
        own["area"].append(each.get("area"))
    part = file.stem.removeprefix("instances_")
    for image in objects_of(whole, file, "images"):
        others = (
            image.get("neg_category_ids") or names
        )  # LVIS labels some names only in each image.
        path = image_file(folder, image.get("file_name"), part, "images")
        yield {
            "image": str(Path(path).relative_to(folder)),
            "objects": objects.get(image.get("id"), {"bbox": [], "label": []}),
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
    hub=Hub("moondream/coco-val-2017-bbox-cleaned", "validation"),
    layout=_layout,
    whole=_whole,
)
