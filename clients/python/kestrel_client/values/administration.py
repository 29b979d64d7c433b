"""The results of AdminService, read from the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .._pb.kestrel.v1 import admin_service_pb2 as pb
from .plain import Plain
from .reading import read, words, words_by_value

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LEVELS = words(pb.LogLevel)
_NAMES: dict[int, LogLevel] = words_by_value(pb.LogLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingProgress:
    """How far a step of loading a model is."""

    step: str
    """What is being done, such as the name of a file."""
    done: int
    total: int
    """The whole work of the step, in bytes or items; 0 if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that was loaded."""

    model: str
    """The name under which it is served."""
    load_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStatistics:
    """Calls of one method that have ended since the server's start. Tokens and durations are totals of the calls that
    succeeded; see MethodStatistics in admin_service.proto."""

    method: str
    """A method of VisionService, like "Query"."""
    ok_calls: int
    failed_calls: int
    """Calls that failed through the server's fault, or whose deadline passed."""
    cancelled_calls: int
    refused_calls: int
    """Invalid calls, calls without permission, and calls beyond a limit."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    total_ms: float
    preprocess_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatistics(Plain):
    """The server's present state, and counts since its start; see GetStatisticsResponse in admin_service.proto."""

    uptime_ms: float
    calls: int
    """Calls in progress, including the one that asks."""
    held_bytes: int
    """Bytes of the messages of these calls."""
    limited_calls: int
    """Calls that a limit of callers refused, since the start."""
    running_requests: int
    waiting_requests: int
    pages: int
    """Pages of the KV cache."""
    free_pages: int
    cached_pages: int
    preemptions: int
    prompt_positions: int
    cached_positions: int
    """Those of prompt_positions whose computation was reused."""
    stored_images: int
    stored_image_bytes: int
    methods: tuple[MethodStatistics, ...]
    """The methods that were called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Plain):
    """A profile that was written."""

    file: str
    """Its name in the server's --profile-dir: a trace for Perfetto, with gzip."""
    size_bytes: int
    duration_ms: float
    """Duration of the recording."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures(Plain):
    """Failing requests that were written since captures were started."""

    files: tuple[str, ...]
    """Their names in the server's --capture-dir, oldest first; for ``kestrel-grpc replay``."""
    lost: int
    """Failed requests that could not be written; the server's log has the reasons."""


def read_level(level: int) -> LogLevel | None:
    return _NAMES.get(level)


def read_progress(message: object, payload: Any) -> LoadingProgress | None:
    """None for a payload without progress."""
    return read(LoadingProgress, payload) if isinstance(payload, pb.LoadingProgress) else None


def read_loaded(message: pb.LoadedModel) -> LoadedModel:
    return read(LoadedModel, message)


def read_statistics(message: pb.GetStatisticsResponse) -> ServerStatistics:
    methods = tuple(read(MethodStatistics, each) for each in message.methods)
    return read(ServerStatistics, message, methods=methods)


def read_profile(message: pb.StopProfileResponse) -> Profile:
    return read(Profile, message)
