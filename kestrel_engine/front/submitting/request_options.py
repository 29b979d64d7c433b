"""Checks of a request's id, priority, timeout and weight."""

from __future__ import annotations

import math
import uuid

from ...errors import InvalidRequest

PRIORITIES = {"high": 0, "normal": 1, "low": 2}

MAX_REQUEST_ID_LENGTH = 128
"""Characters of a caller's request id: it goes into every log line."""


def checked_request_id(request_id: str | None) -> str:
    """The id, or a new one for None. Raises InvalidRequest."""
    if request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request_id, str) or not request_id.isprintable() or not request_id:
        raise InvalidRequest("request_id", "must be printable text")
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(
            "request_id",
            f"has {len(request_id)} characters, the limit is {MAX_REQUEST_ID_LENGTH}",
            value=len(request_id),
            limit=MAX_REQUEST_ID_LENGTH,
        )
    return request_id


def checked_priority(priority: str) -> int:
    """0 is the best. Raises InvalidRequest."""
    if priority not in PRIORITIES:
        raise InvalidRequest("priority", f"{priority!r} is not one of {', '.join(PRIORITIES)}")
    return PRIORITIES[priority]


def deadline_after(timeout_s: float | None, now: float) -> float | None:
    """The instant ``timeout_s`` seconds after ``now``; None without a limit. One that has passed is valid: the request
    ends with DeadlineExceeded. Raises InvalidRequest."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, str) or math.isnan(timeout_s):
        raise InvalidRequest("timeout_s", f"{timeout_s!r} is not a number of seconds")
    return now + timeout_s


def check_weight(weight: float) -> None:
    """Raises InvalidRequest."""
    if isinstance(weight, str) or not 0 < weight < math.inf:
        raise InvalidRequest("weight", f"{weight!r} is not a number above 0")
