"""What an administrator may ask of a server, and what comes back: both admin clients are made of this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from .._pb.kestrel.v1 import admin_service_pb2 as pb
from ..errors import InvalidRequestError

R = TypeVar("R")

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

DEFAULT_TIMEOUT_S = 120.0
"""Profiles and captures are written before an answer comes, and a profiler's first start takes seconds."""

_LEVELS: dict[LogLevel, pb.LogLevel.ValueType] = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}
_NAMES: dict[int, LogLevel] = {level: name for name, level in _LEVELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStatistics:
    """Calls of one method that have ended since the server's start. Tokens and seconds: of those that ended well, all
    together; see MethodStatistics in admin_service.proto."""

    method: str
    """Of VisionService: "Query"."""
    ok_calls: int
    failed_calls: int
    """By the server's fault, or too late."""
    cancelled_calls: int
    refused_calls: int
    """Invalid, not allowed, too many."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    total_seconds: float
    preprocess_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatistics:
    """Numbers of a moment, and counts since the server's start; see GetStatisticsResponse in admin_service.proto."""

    uptime_seconds: float
    calls: int
    """In progress, the one that asked included."""
    held_bytes: int
    """Of their messages."""
    refused_calls: int
    """Since the start, because of a limit of callers."""
    running_requests: int
    waiting_requests: int
    pages: int
    """Of the KV cache."""
    free_pages: int
    cached_pages: int
    preemptions: int
    prompt_positions: int
    cached_positions: int
    """Of these, those whose computation was reused."""
    stored_images: int
    stored_image_bytes: int
    methods: tuple[MethodStatistics, ...]
    """Those that were called."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps`` takes."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that was written."""

    file: str
    """Its name in the server's --profile-dir: a trace for Perfetto, with gzip."""
    file_bytes: int
    seconds: float
    """What was recorded."""
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps`` takes."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """Failing requests that were written since captures were started."""

    files: tuple[str, ...]
    """Their names in the server's --capture-dir, oldest first; for ``kestrel-grpc replay``."""
    lost: int
    """Requests that failed and could not be written: the server's log says why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps`` takes."""
        return {"files": list(self.files), "lost": self.lost}


@dataclass(frozen=True, slots=True)
class Operation(Generic[R]):
    """A call of AdminService. ``read``: from its response to what the caller gets."""

    method: str
    request: Message
    read: Callable[[Any], R]


def drain() -> Operation[int]:
    return Operation("Drain", pb.DrainRequest(), lambda told: int(told.remaining_requests))


def cancel(request_id: str) -> Operation[int]:
    request = pb.CancelRequestRequest(request_id=request_id)
    return Operation("CancelRequest", request, lambda told: int(told.cancelled_requests))


def flush_caches(stored_images: bool) -> Operation[int]:
    request = pb.FlushCachesRequest(stored_images=stored_images)
    return Operation("FlushCaches", request, lambda told: int(told.forgotten_images))


def set_log_level(level: LogLevel, module: str) -> Operation[LogLevel | None]:
    """Raises InvalidRequestError."""
    if level not in _LEVELS:
        raise InvalidRequestError(f"level={level!r}: must be one of {', '.join(_LEVELS)}")
    request = pb.SetLogLevelRequest(level=_LEVELS[level], module=module)
    return Operation("SetLogLevel", request, lambda told: _NAMES.get(told.previous_level))


def statistics() -> Operation[ServerStatistics]:
    return Operation("GetStatistics", pb.GetStatisticsRequest(), _statistics)


def start_profile(
    seconds: float | None, steps: int | None, python_functions: bool
) -> Operation[str]:
    request = pb.StartProfileRequest(
        seconds=seconds, steps=_whole("steps", steps), python_functions=python_functions
    )
    return Operation("StartProfile", request, lambda told: str(told.file))


def stop_profile() -> Operation[Profile]:
    return Operation("StopProfile", pb.StopProfileRequest(), _profile)


def start_capture(requests: int | None, pictures: bool) -> Operation[int]:
    request = pb.StartCaptureRequest(requests=_whole("requests", requests), pictures=pictures)
    return Operation("StartCapture", request, lambda told: int(told.requests))


def stop_capture() -> Operation[Captures]:
    return Operation(
        "StopCapture",
        pb.StopCaptureRequest(),
        lambda told: Captures(files=tuple(told.files), lost=told.lost),
    )


def _statistics(told: pb.GetStatisticsResponse) -> ServerStatistics:
    names = ServerStatistics.__dataclass_fields__.keys() - {"methods"}
    methods = tuple(
        MethodStatistics(
            **{name: getattr(each, name) for name in MethodStatistics.__dataclass_fields__}
        )
        for each in told.methods
    )
    return ServerStatistics(methods=methods, **{name: getattr(told, name) for name in names})


def _profile(told: pb.StopProfileResponse) -> Profile:
    return Profile(
        file=told.file, file_bytes=told.size_bytes, seconds=told.seconds, steps=told.steps
    )


def _whole(name: str, number: int | None) -> int | None:
    """protobuf would refuse other numbers in its own words. Raises InvalidRequestError."""
    if number is not None and not 0 <= number < 2**32:
        raise InvalidRequestError(f"{name}={number}: must be a whole number from 1 on")
    return number
