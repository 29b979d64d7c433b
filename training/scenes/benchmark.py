"""Scenes: the coloured shapes of kestrel-tiny's evaluation set, drawn when they are asked about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from kestrel_client import CaptionTask, SegmentTask, Task
from kestrel_client.commands.evaluation.benchmark import (
    Asking,
    Benchmark,
    Case,
    Item,
    Outcome,
    Score,
)

from .captions import caption
from .evaluation_set import Example, encode, example
from .evaluation_set import Task as SceneTask
from .paths import outline
from .scoring import score

NUM_SEEN, NUM_UNSEEN = 2000, 300
"""Scenes of the whole set: of the main part, and with pairs of colour and shape that training never shows."""
_EVERY = (NUM_SEEN + NUM_UNSEEN) // NUM_UNSEEN


def _items(asking: Asking, limit: int | None) -> Iterator[Item]:
    """Scenes of both parts, mixed, so that every number of scenes has some of both."""
    total = NUM_SEEN + NUM_UNSEEN
    seen = unseen = 0
    for number in range(1, min(total, limit or total) + 1):
        if (number % _EVERY == 0 and unseen < NUM_UNSEEN) or seen == NUM_SEEN:
            part, index, unseen = "unseen-pairs", unseen, unseen + 1
        else:
            part, index, seen = "seen", seen, seen + 1
        yield _item(part, index, number, asking)


def _item(part: str, index: int, number: int, asking: Asking) -> Item:
    found = _example(part, index)
    return Item(
        image=f"{part}/{index}",
        number=number,
        load=lambda: encode(_example(part, index)),
        cases={str(i): _case(found, task, asking) for i, task in enumerate(found.tasks)},
    )


@lru_cache(maxsize=64)
def _example(part: str, index: int) -> Example:
    return example(part, index)


def _case(found: Example, task: SceneTask, asking: Asking) -> Case:
    scene = found.scene
    group = "absent" if task.kind == "absent" else task.skill
    if found.slice != "seen":
        group = f"unseen pairs, {group}"
    shapes = [scene.shapes[i] for i in dict.fromkeys(task.targets)]
    expected = (
        task.answer if task.skill in ("query", "reasoning") else f"{len(shapes)} in the image"
    )
    if task.skill == "caption":
        expected, shapes = caption(scene, task.text), list(scene.shapes)
    return Case(
        task=_asked(task, asking),
        truth=(scene, task),
        question=f"{task.skill}: {task.text}",
        expected=expected,
        group=group,
        boxes=[shape.box for shape in shapes],
        polygons=[outline(shape).tolist() for shape in shapes] if task.skill == "segment" else (),
        frame=(scene.width, scene.height),
    )


def _asked(task: SceneTask, asking: Asking) -> Task:
    settings: dict[str, Any] = {"temperature": asking.temperature, "max_tokens": asking.max_tokens}
    match task.skill:
        case "query" | "reasoning":
            reasoning = task.skill == "reasoning" or asking.reasoning
            return asking.query(
                task.text, "{question}", reasoning=reasoning, spatial_refs=task.refs
            )
        case "caption":
            length: Any = task.text
            return CaptionTask(length, **settings)
        case "point":
            return asking.point(task.text)
        case "detect":
            return asking.detect(task.text)
    return SegmentTask(task.text, min_score=asking.min_score, **settings)


def _score(case: Case, outcome: Outcome | None) -> Score:
    scene, task = case.truth
    record = score(scene, task, _output(task.skill, outcome or {}))
    right = float(record["ok"] and outcome is not None)
    counts: dict[str, tuple[float, float]] = {"right": (right, 1.0)}
    value = right
    targets, found = record["targets"], record.get("found", 0)
    if task.kind == "absent" or task.skill in ("query", "caption"):
        return Score(value, counts, _said(task.skill, outcome))
    if task.skill == "reasoning":
        counts["targets grounded"] = record["hits"], targets
    elif task.skill == "point":
        counts["targets hit"] = record["hits"], targets
        counts["points that hit"] = record["hits"], found
        value = 2 * record["hits"] / (found + targets)
    elif task.skill == "detect":
        ious: list[float] = record["ious"]
        counts["F1 at IoU 0.5"] = 2.0 * len(ious), found + targets
        counts["mean IoU of matches"] = sum(ious), len(ious)
        value = 2 * len(ious) / (found + targets)
    elif task.skill == "segment":
        counts["mean IoU"] = record["iou"], 1.0
        value = record["iou"]
    return Score(value, counts, _said(task.skill, outcome))


def _said(skill: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if skill in ("query", "reasoning"):
        return str(outcome["answer"])
    if skill == "caption":
        return str(outcome["caption"])
    found = {"point": "points", "detect": "objects", "segment": "segments"}[skill]
    return f"{len(outcome.get(found, ()))} found"


def _output(skill: str, outcome: Outcome) -> Mapping[str, Any]:
    """A result as the scenes' scores expect it, which is the form of the engine."""
    if skill in ("query", "reasoning"):
        reasoning = outcome["answers"][0]["reasoning"] or {} if outcome else {}
        grounding = [
            {"points": [(p["x"], p["y"]) for p in chunk["points"]]}
            for chunk in reasoning.get("grounding", ())
        ]
        return {"answer": outcome.get("answer", ""), "reasoning": {"grounding": grounding}}
    if skill == "caption":
        return {"caption": outcome.get("caption", "")}
    if skill == "segment":
        found = outcome.get("segments", ())
        return {"segments": [{"svg_path": s["svg_path"], "bbox": s["box"]} for s in found]}
    return {"points": outcome.get("points", []), "objects": outcome.get("objects", [])}


_SKILLS = ("query", "reasoning", "caption", "point", "detect", "segment", "absent")
BENCHMARK = Benchmark(
    name="scenes",
    title="Scenes of coloured shapes",
    source="docs/lab/kestrel-tiny.md#measured",
    skills=("query", "caption", "point", "detect", "segment"),
    score=_score,
    items=_items,
    default_limit=100,
    groups=(*_SKILLS, *(f"unseen pairs, {skill}" for skill in _SKILLS)),
)
