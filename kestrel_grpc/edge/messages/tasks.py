"""The tasks of a request, wherever its fields hold them."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def task_of(message: Any, skill: str | None = None) -> Any:
    """The task of a skill in a request, such as its QueryTask, or the only task; None if there is none, or more than
    one. ``message``: of a stream of frames, the one that opened it."""
    found = [task for name, task in _tasks(message) if skill in (None, name)]
    return found[0] if len(found) == 1 else None


def _tasks(message: Any) -> list[tuple[str, Any]]:
    """All tasks, each with the name of its skill."""
    if not isinstance(message, Message):
        return []
    request: Any = message
    names = message.DESCRIPTOR.fields_by_name
    if "config" in names:
        return _tasks(request.config)
    holders = request.tasks if "tasks" in names else [request]
    found = []
    for holder in holders:
        for field, value in holder.ListFields():
            if field.message_type is not None and field.message_type.name.endswith("Task"):
                found.append((value.name if field.name == "skill" else field.name, value))
    return found
