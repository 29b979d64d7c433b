"""The tasks of a call as messages: each is a method of its own, and one of the tasks of Analyze."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message

from ..._pb.kestrel.v1 import common_pb2
from ..._pb.kestrel.v1 import vision_service_pb2 as pb
from ..._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from ...errors import InvalidRequestError
from ...geometry import to_spatial_refs, to_tiles
from ...images.images import ImageInput
from ...values.tasks import (
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
    TaskOf,
    to_turns,
)
from ..prepared import Method
from .building import build, choice
from .options import SAMPLING, to_sampling

_CAPTION_LENGTHS = {
    "short": pb.CAPTION_LENGTH_SHORT,
    "normal": pb.CAPTION_LENGTH_NORMAL,
    "long": pb.CAPTION_LENGTH_LONG,
}
_MASK_FORMATS = {
    "none": pb.MASK_FORMAT_NONE,
    "svg": pb.MASK_FORMAT_SVG,
    "png": pb.MASK_FORMAT_PNG,
    "rle": pb.MASK_FORMAT_RLE,
    "polygons": pb.MASK_FORMAT_POLYGONS,
}


def vision_method(unary: str, stream: str) -> Method:
    return Method(VisionServiceStub, unary, stream, repeatable=True)


class _Skill(NamedTuple):
    """A skill of the model: as a method of its own, and as one of the tasks of Analyze."""

    method: Method
    request: Callable[..., Message]
    task: Callable[..., Message]
    field: str
    """The field of AnalyzeTask that holds ``task``."""


_QUERY = _Skill(
    vision_method("Query", "StreamQuery"),
    pb.QueryRequest,
    pb.QueryTask,
    "query",
)
_CAPTION = _Skill(
    vision_method("Caption", "StreamCaption"),
    pb.CaptionRequest,
    pb.CaptionTask,
    "caption",
)
_POINT = _Skill(
    vision_method("Point", "StreamPoint"),
    pb.PointRequest,
    pb.PointTask,
    "point",
)
_DETECT = _Skill(
    vision_method("Detect", "StreamDetect"),
    pb.DetectRequest,
    pb.DetectTask,
    "detect",
)
_SEGMENT = _Skill(
    vision_method("Segment", "StreamSegment"),
    pb.SegmentRequest,
    pb.SegmentTask,
    "segment",
)


def described(
    name: str, task: TaskOf[Any], to_image: Callable[[ImageInput], common_pb2.Image]
) -> tuple[_Skill, dict[str, Any]]:
    """The skill of a task, and the fields that the task's message and the request of the skill's method share.
    ``to_image``: makes the message of an image.

    Raises InvalidRequestError, naming the argument ``name``, for a value that is not a task.
    """
    match task:
        case QueryTask():
            refs = to_spatial_refs(task.spatial_refs)
            return _QUERY, {
                "question": task.question,
                "reasoning": task.reasoning,
                "spatial_refs": refs,
                "history": to_turns(task.history, to_image),
                "system": task.system or None,
                "abstention": _abstention(task),
                "answer_start": task.answer_start or None,
            }
        case CaptionTask():
            return _CAPTION, {"length": choice("length", task.length, _CAPTION_LENGTHS)}
        case PointTask():
            refs = to_spatial_refs(task.spatial_refs)
            return _POINT, {
                "object": task.object,
                "max_objects": task.max_objects,
                "spatial_refs": refs,
                "min_score": task.min_score,
                "tiles": to_tiles(task.tiles),
            }
        case DetectTask():
            return _DETECT, {
                "object": task.object,
                "max_objects": task.max_objects,
                "min_score": task.min_score,
                "max_overlap": task.max_overlap,
                "tiles": to_tiles(task.tiles),
            }
        case SegmentTask():
            return _SEGMENT, {
                "object": task.object,
                "spatial_refs": to_spatial_refs(task.spatial_refs),
                "mask_format": choice("mask", task.mask, _MASK_FORMATS),
                "min_score": task.min_score,
                "refine": task.refine,
            }
    raise InvalidRequestError(f"{name}: {task!r} is not a task, like QueryTask")


def _abstention(task: QueryTask) -> pb.Abstention | None:
    """None without objects. Raises InvalidRequestError."""
    if isinstance(task.presupposes, str):
        raise InvalidRequestError("presupposes: must be a list of names of objects, not one text")
    if task.max_absence is not None and not task.presupposes:
        raise InvalidRequestError("max_absence: needs objects that the question presupposes")
    if not task.presupposes:
        return None
    return build(pb.Abstention, objects=task.presupposes, max_absence=task.max_absence)


def to_task(key: str, task: Task) -> pb.AnalyzeTask:
    """Raises InvalidRequestError."""

    def refuse(image: ImageInput) -> common_pb2.Image:
        raise InvalidRequestError(f"tasks[{key!r}]: all tasks are about one image; use query")

    if isinstance(task, QueryTask) and task.images:
        refuse(task.images[0])
    skill, fields = described(f"tasks[{key!r}]", task, refuse)
    if fields.pop("tiles", None) is not None:
        raise InvalidRequestError(f"tasks[{key!r}]: tiles are for point and detect alone")
    sampling = to_sampling({name: getattr(task, name) for name in SAMPLING})
    message = build(skill.task, **fields, sampling=sampling)
    return build(pb.AnalyzeTask, key=key, **{skill.field: message})
