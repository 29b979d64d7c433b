"""Request: one request, from its caller to its submission."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidRequest
from ..skills.base import SkillRequest
from ..types.adapter import Adapter
from ..types.timings import FrontTimings

PRIORITIES = {"high": 0, "normal": 1, "low": 2}

MAX_REQUEST_ID_LENGTH = 128
"""Characters of a caller's request id: it goes into every log line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks of the engine. It never changes: each stage before the submission (submitter.py) returns the
    request with what it adds.

    ``images``: in the order of the prompt, as they are given to `InferenceEngine.submit`, then prepared. ``adapter``:
    its name, then the loaded adapter; None: that of the engine, if it has one. ``deadline_at``: an instant of the
    engine's clock after which nothing is begun for the request; all stages share it. The other fields that a caller
    sets are as for `InferenceEngine.submit`.
    """

    skill: str
    images: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | Adapter | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    priority: str = "normal"
    deadline_at: float | None = None
    cache_salt: str = ""
    principal: str = ""
    weight: float = 1.0
    work: SkillRequest | None = None
    """What the skill makes of arguments and settings; None until the request has all that it needs, as ``timings``."""
    timings: FrontTimings | None = None


def as_images(image: Any) -> tuple[Any, ...]:
    """The images of a request: none, one, or several in a list."""
    if isinstance(image, (list, tuple)):
        return tuple(image)
    return () if image is None else (image,)


def without_adapter(settings: Any) -> tuple[str | None, Any]:
    """The adapter that ``settings`` name, if they name one, and the skill's settings."""
    if not isinstance(settings, Mapping) or "adapter" not in settings:
        return None, settings
    return settings["adapter"], {k: v for k, v in settings.items() if k != "adapter"}


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest."""
    if not isinstance(request_id, str) or not request_id.isprintable() or not request_id:
        raise InvalidRequest("request_id", "must be printable text")
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(
            "request_id",
            f"has {len(request_id)} characters, the limit is {MAX_REQUEST_ID_LENGTH}",
            value=len(request_id),
            limit=MAX_REQUEST_ID_LENGTH,
        )


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
