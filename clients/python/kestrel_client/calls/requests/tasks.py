"""The tasks of a call as messages: each is a method of its own, and one of the tasks of Analyze."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from ..._pb.kestrel.v1 import vision_service_pb2 as pb
from ..._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ...errors import InvalidRequestError
from ...geometry import to_boxes, to_points, to_spatial_refs, to_tiles
from ...values.reading import words
from ...values.struct_values import to_struct
from ...values.tasks import (
    CaptionTask,
    DetectTask,
    GazeTask,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
    Task,
    TaskOf,
    names_of,
    to_turns,
)
from ..prepared_call import Method
from .building import build, choice
from .options import (
    DetectOptions,
    GazeOptions,
    PointOptions,
    QueryOptions,
    SegmentOptions,
    TextOptions,
    generation,
)

_CAPTION_LENGTHS = words(pb.CaptionLength)
_MASK_FORMATS = {"none": pb.MASK_FORMAT_UNSPECIFIED, **words(pb.MaskFormat)}
_REFINEMENTS = {None: None, False: pb.REFINEMENT_NONE, True: pb.REFINEMENT_REQUIRED}


def vision_method(name: str) -> Method:
    return Method(VisionServiceStub, name, f"Stream{name}", repeatable=True)


class TaskKind(NamedTuple):
    """A kind of task: a method of its own, and one of the tasks of Analyze."""

    rpc: str
    request: Callable[..., Message]
    task: type[Message]
    """The class of the task's message."""
    field: str
    """The field that holds the task, in ``request`` and in pb.Task."""
    options: type
    """The options that its calls take."""

    @property
    def method(self) -> Method:
        return vision_method(self.rpc)


_KINDS: dict[type[TaskOf[Any]], TaskKind] = {
    QueryTask: TaskKind("Query", pb.QueryRequest, pb.QueryTask, "query", QueryOptions),
    CaptionTask: TaskKind("Caption", pb.CaptionRequest, pb.CaptionTask, "caption", TextOptions),
    PointTask: TaskKind("Point", pb.PointRequest, pb.PointTask, "point", PointOptions),
    DetectTask: TaskKind("Detect", pb.DetectRequest, pb.DetectTask, "detect", DetectOptions),
    SegmentTask: TaskKind("Segment", pb.SegmentRequest, pb.SegmentTask, "segment", SegmentOptions),
    GazeTask: TaskKind("Gaze", pb.GazeRequest, pb.GazeTask, "gaze", GazeOptions),
    SkillTask: TaskKind("RunSkill", pb.RunSkillRequest, pb.SkillTask, "skill", TextOptions),
}

_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "spatial_refs": to_spatial_refs,
    "history": lambda turns: [turn.message for turn in to_turns(turns)],
    "system": lambda text: text or None,
    "answer_start": lambda text: text or None,
    "length": lambda length: choice("length", length, _CAPTION_LENGTHS),
    "objects": names_of,
    "tiles": to_tiles,
    "eyes": lambda points: to_points("eyes", points),
    "faces": lambda boxes: to_boxes("faces", boxes),
    "arguments": lambda values: to_struct("arguments", values),
    "settings": lambda values: to_struct("settings", values),
}
"""Values of tasks by their names. Other values are in the messages as they are."""


def kind_of(name: str, task: TaskOf[Any]) -> TaskKind:
    """Raises InvalidRequestError, naming the argument ``name``, for a value that is not a task."""
    skill = _KINDS.get(type(task))
    if skill is None:
        raise InvalidRequestError(f"{name}: {task!r} is not a task, like QueryTask")
    return skill


def to_message(task: TaskOf[Any], options: Mapping[str, Any]) -> Message:
    """The message of a task. Its own sampling options take precedence over ``options``. Raises InvalidRequestError.

    The turns of a QueryTask count no images.
    """
    own = {f.name: getattr(task, f.name) for f in fields(task)}
    kind = _KINDS[type(task)].task
    names = kind.DESCRIPTOR.fields_by_name
    parts = {
        name: _CONVERTED[name](value) if name in _CONVERTED else value
        for name, value in own.items()
        if name in names
    }
    if isinstance(task, QueryTask):
        parts["abstention"] = _abstention(task)
    if isinstance(task, SegmentTask):
        parts["mask_format"] = choice("mask", task.mask, _MASK_FORMATS)
        parts["refinement"] = _REFINEMENTS[task.refine]
    parts |= generation({**options, **{n: v for n, v in own.items() if v is not None}})
    return build(kind, **parts)


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
    skill = kind_of(f"tasks[{key!r}]", task)
    if isinstance(task, QueryTask):
        task = replace(task, history=tuple(task.history))
        if task.images or any(turn.images for turn in to_turns(task.history)):
            raise InvalidRequestError(f"tasks[{key!r}]: all tasks are about one image; use query")
    return build(pb.Task, key=key, **{skill.field: to_message(task, {})})
