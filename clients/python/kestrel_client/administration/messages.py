"""The calls of AdminService and their results: the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from .._pb.kestrel.v1 import admin_service_pb2 as pb
from .._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from ..calls.prepared import Method, Prepared, prepare
from ..calls.requests.building import build
from ..calls.streams import Reading
from ..connection import Connection
from ..errors import InvalidRequestError
from ..values.description import Adapter, read_adapter

R = TypeVar("R")

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

DEFAULT_TIMEOUT_S = 120.0
"""The server writes a profile or capture before it answers, and the first start of a profiler takes seconds."""

_LEVELS: dict[LogLevel, pb.LogLevel.ValueType] = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}
_NAMES: dict[int, LogLevel] = {level: name for name, level in _LEVELS.items()}


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
class ServerStatistics:
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that was written."""

    file: str
    """Its name in the server's --profile-dir: a trace for Perfetto, with gzip."""
    size_bytes: int
    duration_ms: float
    """Duration of the recording."""
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """Failing requests that were written since captures were started."""

    files: tuple[str, ...]
    """Their names in the server's --capture-dir, oldest first; for ``kestrel-grpc replay``."""
    lost: int
    """Failed requests that could not be written; the server's log has the reasons."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return {"files": list(self.files), "lost": self.lost}


STUBS = (AdminServiceStub,)
"""Those that the calls of AdminRequests need."""


class AdminRequests:
    """Prepares the calls of one connection. All methods raise InvalidRequestError for arguments that can't be sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def drain(self, timeout: float | None) -> Prepared[int]:
        return self._call("Drain", pb.DrainRequest(), lambda r: int(r.remaining_requests), timeout)

    def cancel(self, request_id: str, timeout: float | None) -> Prepared[int]:
        request = pb.CancelRequestRequest(request_id=request_id)
        return self._call("CancelRequest", request, lambda r: int(r.cancelled_requests), timeout)

    def flush_caches(self, stored_images: bool, timeout: float | None) -> Prepared[int]:
        request = pb.FlushCachesRequest(stored_images=stored_images)
        return self._call("FlushCaches", request, lambda r: int(r.deleted_images), timeout)

    def set_log_level(
        self, level: LogLevel, module: str, timeout: float | None
    ) -> Prepared[LogLevel | None]:
        if level not in _LEVELS:
            raise InvalidRequestError(f"level={level!r}: must be one of {', '.join(_LEVELS)}")
        request = pb.SetLogLevelRequest(level=_LEVELS[level], module=module)
        return self._call("SetLogLevel", request, lambda r: _NAMES.get(r.previous_level), timeout)

    def statistics(self, timeout: float | None) -> Prepared[ServerStatistics]:
        return self._call("GetStatistics", pb.GetStatisticsRequest(), _statistics, timeout)

    def start_profile(
        self,
        seconds: float | None,
        steps: int | None,
        python_functions: bool,
        timeout: float | None,
    ) -> Prepared[str]:
        request = pb.StartProfileRequest(
            duration_ms=_milliseconds(seconds),
            steps=_whole("steps", steps),
            python_functions=python_functions,
        )
        return self._call("StartProfile", request, lambda r: str(r.file), timeout)

    def stop_profile(self, timeout: float | None) -> Prepared[Profile]:
        return self._call("StopProfile", pb.StopProfileRequest(), _profile, timeout)

    def start_capture(
        self, requests: int | None, images: bool, timeout: float | None
    ) -> Prepared[int]:
        request = pb.StartCaptureRequest(requests=_whole("requests", requests), images=images)
        return self._call("StartCapture", request, lambda r: int(r.requests), timeout)

    def stop_capture(self, timeout: float | None) -> Prepared[Captures]:
        def read(response: pb.StopCaptureResponse) -> Captures:
            return Captures(files=tuple(response.files), lost=response.lost)

        return self._call("StopCapture", pb.StopCaptureRequest(), read, timeout)

    def load_model(
        self,
        source: str,
        settings: Mapping[str, str] | None,
        make_default: bool,
        timeout: float | None,
    ) -> Prepared[LoadedModel]:
        request = build(
            pb.LoadModelRequest, source=source, settings=settings, make_default=make_default
        )
        method = Method(AdminServiceStub, "", stream="LoadModel")
        reading = Reading(_loaded, _loading)
        return prepare(self._connection, method, request, reading, timeout=timeout)

    def unload_model(
        self, name: str, grace_s: float | None, timeout: float | None
    ) -> Prepared[None]:
        request = pb.UnloadModelRequest(model=name, grace_ms=_milliseconds(grace_s))
        return self._call("UnloadModel", request, lambda r: None, timeout)

    def set_default_model(self, name: str, timeout: float | None) -> Prepared[str]:
        request = pb.SetDefaultModelRequest(model=name)
        return self._call("SetDefaultModel", request, lambda r: str(r.previous_model), timeout)

    def load_adapter(
        self, name: str, model: str | None, timeout: float | None
    ) -> Prepared[Adapter]:
        request = pb.LoadAdapterRequest(adapter=name, model=model)
        return self._call("LoadAdapter", request, lambda r: read_adapter(r.adapter), timeout)

    def unload_adapter(self, name: str, model: str | None, timeout: float | None) -> Prepared[bool]:
        request = pb.UnloadAdapterRequest(adapter=name, model=model)
        return self._call("UnloadAdapter", request, lambda r: bool(r.was_loaded), timeout)

    def _call(
        self, name: str, request: Message, read: Callable[[Any], R], timeout: float | None
    ) -> Prepared[R]:
        method = Method(AdminServiceStub, name)
        return prepare(self._connection, method, request, read, timeout=timeout)


def _statistics(response: pb.GetStatisticsResponse) -> ServerStatistics:
    names = ServerStatistics.__dataclass_fields__.keys() - {"methods"}
    methods = tuple(
        MethodStatistics(
            **{name: getattr(each, name) for name in MethodStatistics.__dataclass_fields__}
        )
        for each in response.methods
    )
    return ServerStatistics(methods=methods, **{name: getattr(response, name) for name in names})


def _profile(response: pb.StopProfileResponse) -> Profile:
    return Profile(
        file=response.file,
        size_bytes=response.size_bytes,
        duration_ms=response.duration_ms,
        steps=response.steps,
    )


def _whole(name: str, number: int | None) -> int | None:
    """Refuses numbers that the field can't hold, with a clearer message than protobuf's."""
    if number is not None and not 0 <= number < 2**31:
        raise InvalidRequestError(f"{name}={number}: must be a whole number from 1 on")
    return number


def _milliseconds(seconds: float | None) -> int | None:
    if seconds is not None and not 0 <= seconds < 2**31 / 1e3:
        raise InvalidRequestError(f"{seconds} s: is too long, or below 0")
    return None if seconds is None else round(seconds * 1e3)


def _loading(message: pb.LoadModelResponse, payload: Any) -> LoadingProgress | None:
    if message.WhichOneof("event") != "progress":
        return None
    return LoadingProgress(step=payload.step, done=payload.done, total=payload.total)


def _loaded(payload: pb.LoadedModel) -> LoadedModel:
    return LoadedModel(model=payload.model, load_ms=payload.load_ms)
