"""The tasks of a call as messages: each is a method of its own, and one of the tasks of Analyze."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from ..._pb.kestrel.v1 import vision_service_pb2 as pb
from ..._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ...errors import InvalidRequestError
from ...geometry import to_spatial_refs, to_tiles
from ...values.reading import words
from ...values.struct_values import to_struct
from ...values.tasks import (
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
    Task,
    TaskOf,
    names_of,
    to_turns,
)
from ..prepared import Method
from .building import build, choice
from .options import CallOptions, QueryOptions, TextOptions, generation

_CAPTION_LENGTHS = words(pb.CaptionLength)
_MASK_FORMATS = {"none": pb.MASK_FORMAT_UNSPECIFIED, **words(pb.MaskFormat)}
_REFINEMENTS = {None: None, False: pb.REFINEMENT_NONE, True: pb.REFINEMENT_REQUIRED}


def vision_method(name: str) -> Method:
    return Method(VisionServiceStub, name, f"Stream{name}", repeatable=True)


class Skill(NamedTuple):
    """A kind of task: a method of its own, and one of the tasks of Analyze."""

    method: Method
    request: Callable[..., Message]
    field: str
    """The field that holds the task, in ``request`` and in pb.Task."""
    options: type
    """The options that its calls take."""


_SKILLS: dict[type[TaskOf[Any]], Skill] = {
    QueryTask: Skill(vision_method("Query"), pb.QueryRequest, "query", QueryOptions),
    CaptionTask: Skill(vision_method("Caption"), pb.CaptionRequest, "caption", TextOptions),
    PointTask: Skill(vision_method("Point"), pb.PointRequest, "point", CallOptions),
    DetectTask: Skill(vision_method("Detect"), pb.DetectRequest, "detect", CallOptions),
    SegmentTask: Skill(vision_method("Segment"), pb.SegmentRequest, "segment", CallOptions),
    SkillTask: Skill(vision_method("RunSkill"), pb.RunSkillRequest, "skill", TextOptions),
}


def skill_of(name: str, task: TaskOf[Any]) -> Skill:
    """Raises InvalidRequestError, naming the argument ``name``, for a value that is not a task."""
    skill = _SKILLS.get(type(task))
    if skill is None:
        raise InvalidRequestError(f"{name}: {task!r} is not a task, like QueryTask")
    return skill


def to_message(task: TaskOf[Any], options: Mapping[str, Any]) -> Message:
    """The message of a task. Its own sampling options take precedence over ``options``. Raises InvalidRequestError.

    The turns of a QueryTask count no images.
    """
    own = {f.name: getattr(task, f.name) for f in fields(task)}
    generated = generation({**options, **{n: v for n, v in own.items() if v is not None}})
    match task:
        case QueryTask():
            return build(
                pb.QueryTask,
                question=task.question,
                reasoning=task.reasoning,
                spatial_refs=to_spatial_refs(task.spatial_refs),
                history=[turn.message for turn in to_turns(task.history)],
                system=task.system or None,
                abstention=_abstention(task),
                answer_start=task.answer_start or None,
                num_samples=task.num_samples,
                **generated,
            )
        case CaptionTask():
            length = choice("length", task.length, _CAPTION_LENGTHS)
            return build(pb.CaptionTask, length=length, num_samples=task.num_samples, **generated)
        case PointTask():
            return build(
                pb.PointTask,
                objects=names_of(task.objects),
                max_objects=task.max_objects,
                spatial_refs=to_spatial_refs(task.spatial_refs),
                min_score=task.min_score,
                tiles=to_tiles(task.tiles),
                **generated,
            )
        case DetectTask():
            return build(
                pb.DetectTask,
                objects=names_of(task.objects),
                max_objects=task.max_objects,
                min_score=task.min_score,
                max_overlap=task.max_overlap,
                tiles=to_tiles(task.tiles),
                **generated,
            )
        case SegmentTask():
            return build(
                pb.SegmentTask,
                objects=names_of(task.objects),
                spatial_refs=to_spatial_refs(task.spatial_refs),
                mask_format=choice("mask", task.mask, _MASK_FORMATS),
                min_score=task.min_score,
                refinement=_REFINEMENTS[task.refine],
                **generated,
            )
        case SkillTask():
            return build(
                pb.SkillTask,
                name=task.name,
                arguments=to_struct("arguments", task.arguments),
                settings=to_struct("settings", task.settings),
                **generated,
            )
    raise AssertionError(task)


def _abstention(task: QueryTask) -> pb.Abstention | None:
    """None without objects. Raises InvalidRequestError."""
    if isinstance(task.presupposes, str):
        raise InvalidRequestError("presupposes: must be a list of names of objects, not one text")
    if task.max_absence is not None and not task.presupposes:
        raise InvalidRequestError("max_absence: needs objects that the question presupposes")
    if not task.presupposes:
        return None
    return build(pb.Abstention, objects=task.presupposes, max_absence=task.max_absence)


def to_task(key: str, task: Task) -> pb.Task:
    """One of the tasks of Analyze. Raises InvalidRequestError."""
    skill = skill_of(f"tasks[{key!r}]", task)
    if isinstance(task, QueryTask):
        task = replace(task, history=tuple(task.history))
        if task.images or any(turn.images for turn in to_turns(task.history)):
            raise InvalidRequestError(f"tasks[{key!r}]: all tasks are about one image; use query")
    return build(pb.Task, key=key, **{skill.field: to_message(task, {})})
