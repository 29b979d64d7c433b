"""Request: one request, from its caller to its submission."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict

from .. import clock
from ..errors import InvalidRequest
from ..skills.base import SkillRequest
from ..types.adapter import Adapter
from ..types.events import EngineMetrics
from ..types.timings import FrontTimings

PRIORITIES = {"high": 0, "normal": 1, "low": 2}

MAX_REQUEST_ID_LENGTH = 128
"""Characters of a caller's request id: it goes into every log line."""


class TokenEstimate(NamedTuple):
    """The most tokens that a request may use, in all its sequences together: positions of text and of images in its
    prompts, and of its answer."""

    text: int
    image: int
    output: int


class Reservation(Protocol):
    """Tokens that were reserved for a request."""

    def settle(self, metrics: EngineMetrics) -> None:
        """The request has ended, after something was computed for it. Before ``close``."""
        ...

    def close(self) -> None:
        """Whatever became of the request, it uses no more. Called once or more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks of the engine. It never changes: each stage before the submission (submitter.py) returns the
    request with what it adds.

    ``images``: in the order of the prompt, as they are given to `InferenceEngine.submit`, then prepared. ``adapter``:
    its name; None: that of the engine, if it has one. ``deadline_at``: an instant of the engine's clock after which
    nothing is begun for the request; all stages share it. The others are as in `CallerOptions`.
    """

    skill: str
    images: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    priority: str = "normal"
    deadline_at: float | None = None
    cache_salt: str = ""
    principal: str = ""
    weight: float = 1.0
    reserve: Callable[[TokenEstimate], Reservation] | None = None
    """Reserves tokens for the request when it is checked, or raises the error that refuses it."""
    reservation: Reservation | None = None
    checked: SkillRequest | None = None
    """What the skill makes of arguments and settings; None until the request has all that it needs, as ``timings``."""
    timings: FrontTimings | None = None
    loaded: Adapter | None = None
    """The adapter that applies to the request, loaded with the rest of what it needs."""


class CallerOptions(TypedDict, total=False):
    """What a caller may set beside a request's content; None is the default.

    ``timeout_s``: the request is dropped if nothing was computed for it by then. ``cache_salt``: images and prefixes
    are shared with requests of the same salt only. ``principal``: the caller's name; "" is one principal, too.
    ``weight``: the principal's share relative to others, above 0. ``priority``: "high", "normal" or "low".
    """

    request_id: str | None
    priority: str
    timeout_s: float | None
    cache_salt: str
    principal: str
    weight: float


class RequestOptions(CallerOptions, total=False):
    """``adapter``: the name of one."""

    adapter: str | None


def request_of(
    skill: str,
    image: Any,
    arguments: Mapping[str, Any] | None,
    settings: Any,
    options: CallerOptions,
) -> Request:
    """A request as `InferenceEngine.submit` takes it. ``options``: those of `RequestOptions`. Raises InvalidRequest."""
    images = tuple(image) if isinstance(image, (list, tuple)) else (image,)
    chosen: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    timeout_s = chosen.pop("timeout_s", None)
    settings = settings or {}
    if isinstance(settings, Mapping) and "adapter" in settings:
        settings = dict(settings)
        chosen = {"adapter": settings.pop("adapter"), **chosen}
    return Request(
        skill=skill,
        images=() if image is None else images,
        arguments=arguments or {},
        settings=settings,
        deadline_at=deadline_after(timeout_s, clock.now()),
        **chosen,
    )


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
