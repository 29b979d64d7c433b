"""The fields of a task by their names alone, as the HTTP and KServe adapters know them: ``top_p`` stands for
``query.sampling.top_p``. Owns the way from one to the other."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from google.rpc import error_details_pb2, status_pb2

from kestrel_engine import InvalidRequest

_PREFIX = re.compile(r"(?:query|caption|point|detect|segment)\.(?:(?:sampling|text)\.)?")
_OWN = ("max_tokens", "max_reasoning_tokens", "max_objects", "min_score", "max_overlap")
"""The settings that a task itself has."""


def short_path(path: str) -> str:
    """The path of a field in its task, without ``sampling`` and ``text``. Other paths stay."""
    return _PREFIX.sub("", path, count=1)


def holder(task: Any, name: str, field: str) -> Any:
    """The message with the setting ``name``: the task, its sampling or its text. Raises InvalidRequest, which names
    ``field``, if the task has no such setting."""
    has = task.DESCRIPTOR.fields_by_name
    holders = {own: "" for own in _OWN if own in has}
    for part in ("sampling", "text"):
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
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in error.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            violation = bad.field_violations[0]
            message = f"{short_path(violation.field)}: {violation.description}"
    return Fault(error.code, reason, message)
