"""The fields of a task by their names alone, as the engine and the HTTP and KServe adapters know them: ``top_p`` stands
for ``query.sampling.top_p``. Owns the way from one to the other."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.rpc import error_details_pb2, status_pb2

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

REQUESTS: dict[str, Any] = {
    "query": pb.QueryRequest,
    "caption": pb.CaptionRequest,
    "point": pb.PointRequest,
    "detect": pb.DetectRequest,
    "segment": pb.SegmentRequest,
    "gaze": pb.GazeRequest,
}
"""The requests of the skills that the adapters have, by the name of their task."""
_TASKS = frozenset(field.name for field in pb.Task.DESCRIPTOR.oneofs_by_name["task"].fields)
_PARTS = ("sampling", "text")
_OWN = ("max_tokens", "max_reasoning_tokens", "max_objects", "min_score", "max_overlap")
"""The settings that a task itself has."""
_OTHER_NAMES: dict[str, FieldPath] = {
    "presupposes": ("abstention", "objects"),
    "max_absence": ("abstention", "max_absence"),
    "refine": ("refinement",),
}
"""Where a task has the engine's arguments and settings that have another name there."""


def short_path(path: FieldPath) -> FieldPath:
    """The path of a field in its task, without ``sampling`` and ``text``. Other paths stay."""
    if len(path) < 2 or path[0] not in _TASKS:
        return path
    return path[2:] if len(path) > 2 and path[1] in _PARTS else path[1:]


def task_path(task: Any, path: FieldPath, index: int) -> FieldPath | None:
    """Where ``task`` has what the engine names ``path``; None if it has no such field. ``index``: of the name that the
    engine's request is about."""
    name, fields = str(path[0]), task.DESCRIPTOR.fields_by_name
    if isinstance(task, pb.SkillTask):
        for part in ("settings", "arguments"):
            if name in getattr(task, part).fields:
                return (part, *path)
    if name == "object" and "objects" in fields:
        return ("objects", index, *path[1:])
    if isinstance(task, pb.GazeTask) and name == "eye":
        return ("eyes" if task.eyes else "faces", index, *path[1:])
    other = _OTHER_NAMES.get(name, (name,))
    if other[0] in fields:
        return (*other, *path[1:])
    for part in _PARTS:
        if part in fields and name in fields[part].message_type.fields_by_name:
            if path[:2] == ("constraint", "choices") and len(path) > 2:
                return (part, *path[:2], "texts", *path[2:])
            return (part, *path)
    return None


def holder(task: Any, name: str, field: str | FieldPath) -> Any:
    """The message with the setting ``name``: the task, its sampling or its text. Raises InvalidRequest, which names
    ``field``, if the task has no such setting."""
    has = task.DESCRIPTOR.fields_by_name
    holders = {own: "" for own in _OWN if own in has}
    for part in _PARTS:
        if part in has:
            holders |= dict.fromkeys(has[part].message_type.fields_by_name, part)
    if name not in holders:
        known = ", ".join(sorted(holders))
        raise InvalidRequest(field, f"is not a setting of this skill; known: {known}")
    part = holders[name]
    return getattr(task, part) if part else task


class Fault(NamedTuple):
    """Why the search for one name failed. ``reason``: that of the ErrorInfo."""

    code: int
    reason: str
    message: str


def fault_of(error: status_pb2.Status) -> Fault:
    """The fault, with the short path of the field in its message."""
    reason, message = "", error.message
    info = error_details_pb2.ErrorInfo()
    for detail in error.details:
        if detail.Unpack(info):
            reason = info.reason
            task, _, short = info.metadata["field"].partition(".")
            if task in _TASKS:
                message = short + message.removeprefix(info.metadata["field"])
    return Fault(error.code, reason, message)
