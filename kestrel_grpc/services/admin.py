"""AdminService: drain, cancel, flush, log level, statistics, profiles and captures.

The service holds no state. The guard (security/admission) decides who may call it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceServicer
from kestrel_engine import InferenceEngine, InvalidRequest, RequestError, clock

from ..edge.calls.call import Context
from ..edge.calls.current_call import current_call
from ..edge.calls.request_ids import valid_request_id
from ..edge.failures.errors import LocatedError
from ..images.store import ImageStore
from ..model_changes import Loading, ModelChanges
from ..monitoring.call_statistics import CallStatistics, MethodCounts
from ..monitoring.capture import DEFAULT_REQUESTS, MAX_REQUESTS, Capture
from ..monitoring.profiles import (
    DEFAULT_SECONDS,
    DEFAULT_STEPS,
    MAX_SECONDS,
    MAX_STEPS,
    MIN_SECONDS,
    Profiles,
)
from ..security.admission.guard import Guard
from ..served_model import ServedModels
from .messages.responses import rounded_s

logger = logging.getLogger(__name__)

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}
_MOST_GRACE_S = 86_400
_NAMES = {level: name for name, level in _LEVELS.items()}


class AdminService(AdminServiceServicer):
    """``drain``: makes the server refuse new requests and then stop. ``grace_s``: for the requests of a model that is
    unloaded."""

    def __init__(
        self,
        served: ServedModels,
        images: ImageStore,
        guard: Guard,
        drain: Callable[[], Awaitable[None]],
        profiles: Profiles,
        capture: Capture,
        calls: CallStatistics,
        models: ModelChanges,
        grace_s: float,
    ) -> None:
        self._served, self._images, self._guard = served, images, guard
        self._models, self._grace_s = models, grace_s
        self._drain = drain
        self._profiles, self._capture, self._calls = profiles, capture, calls
        self._started_at = clock.now()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        _log_action("drain")
        await self._drain()
        return pb.DrainResponse(remaining_requests=self._served.num_requests)

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: Context
    ) -> pb.CancelRequestResponse:
        if not valid_request_id(request.request_id):
            error = InvalidRequest(
                "request_id", "must be 1 to 128 visible ASCII characters (! to ~)"
            )
            raise LocatedError(error, "request_id")
        count = sum(engine.cancel(request.request_id) for engine in self._served.engines)
        _log_action("cancel %d requests with id %s", count, request.request_id)
        return pb.CancelRequestResponse(cancelled_requests=count)

    async def FlushCaches(
        self, request: pb.FlushCachesRequest, context: Context
    ) -> pb.FlushCachesResponse:
        for engine in self._served.engines:
            await engine.flush_caches()
        removed = self._images.clear() if request.stored_images else 0
        _log_action("flush caches and %d stored images", removed)
        return pb.FlushCachesResponse(forgotten_images=removed)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        level = _LEVELS.get(request.level)
        if level is None:
            raise InvalidRequest("level", "must be DEBUG, INFO, WARNING or ERROR")
        module_logger = _find_logger(request.module)
        before = _NAMES.get(module_logger.level, pb.LOG_LEVEL_UNSPECIFIED)
        # The change is logged at INFO, even if the new level hides that.
        module_logger.setLevel(min(level, logging.INFO))
        _log_action(
            "log level of %s set to %s",
            request.module or "all modules",
            logging.getLevelName(level),
        )
        module_logger.setLevel(level)
        return pb.SetLogLevelResponse(previous_level=before)

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        seconds = request.seconds if request.HasField("seconds") else DEFAULT_SECONDS
        steps = request.steps if request.HasField("steps") else DEFAULT_STEPS
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise InvalidRequest("seconds", f"must be {MIN_SECONDS:g} to {MAX_SECONDS:g}")
        if not 1 <= steps <= MAX_STEPS:
            raise InvalidRequest("steps", f"must be 1 to {MAX_STEPS}")
        file = await self._profiles.start(
            self._served.loaded,
            seconds=seconds,
            steps=steps,
            python_functions=request.python_functions,
        )
        _log_action("profile %s of %g s or %d steps", file, seconds, steps)
        return pb.StartProfileResponse(file=file)

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: Context
    ) -> pb.StopProfileResponse:
        profile = await self._profiles.stop()
        return pb.StopProfileResponse(
            file=os.path.basename(profile.path),
            size_bytes=profile.file_bytes,
            seconds=rounded_s(profile.seconds),
            steps=profile.steps,
        )

    async def StartCapture(
        self, request: pb.StartCaptureRequest, context: Context
    ) -> pb.StartCaptureResponse:
        requests = request.requests if request.HasField("requests") else DEFAULT_REQUESTS
        if not 1 <= requests <= MAX_REQUESTS:
            raise InvalidRequest("requests", f"must be 1 to {MAX_REQUESTS}")
        self._capture.start(requests, images=request.pictures)
        _log_action(
            "capture %d failing requests, %s images",
            requests,
            "with" if request.pictures else "without",
        )
        return pb.StartCaptureResponse(requests=requests)

    async def StopCapture(
        self, request: pb.StopCaptureRequest, context: Context
    ) -> pb.StopCaptureResponse:
        files, lost = await self._capture.stop()
        _log_action("stop captures: %d written, %d lost", len(files), lost)
        return pb.StopCaptureResponse(files=files, lost=lost)

    async def LoadModel(  # type: ignore[override]
        self, request: pb.LoadModelRequest, context: Context
    ) -> None:
        _log_action("load model %s", request.model[:200])
        try:
            events = self._models.load(request.model, make_default=request.make_default)
        except InvalidRequest as error:
            raise LocatedError(error, "model") from error
        await current_call().accept()
        async for event in events:
            if isinstance(event, Loading):
                progress = pb.LoadingProgress(step=event.step, done=event.done, total=event.total)
                await context.write(pb.LoadModelResponse(progress=progress))
            else:
                final = pb.LoadedModel(
                    name=event.name, device=event.device, seconds=rounded_s(event.seconds)
                )
                await context.write(pb.LoadModelResponse(final=final))

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        grace_s = request.grace_seconds if request.HasField("grace_seconds") else self._grace_s
        if not 0 <= grace_s <= _MOST_GRACE_S:
            raise InvalidRequest("grace_seconds", f"must be 0 to {_MOST_GRACE_S}")
        _log_action("unload model %s", request.name[:200])
        await self._models.unload(request.name, grace_s)
        return pb.UnloadModelResponse()

    async def SetDefaultModel(
        self, request: pb.SetDefaultModelRequest, context: Context
    ) -> pb.SetDefaultModelResponse:
        previous = self._models.make_default(request.name)
        _log_action("default model %s in place of %s", request.name, previous)
        return pb.SetDefaultModelResponse(previous=previous)

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        engine = self._engine_of(request)
        with _located("name"):
            num_bytes = await engine.load_adapter(request.name)
        _log_action("load adapter %s", request.name)
        return pb.LoadAdapterResponse(adapter_bytes=num_bytes)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        engine = self._engine_of(request)
        with _located("name"):
            was_loaded = engine.unload_adapter(request.name)
        _log_action("unload adapter %s", request.name)
        return pb.UnloadAdapterResponse(was_loaded=was_loaded)

    def _engine_of(
        self, request: pb.LoadAdapterRequest | pb.UnloadAdapterRequest
    ) -> InferenceEngine:
        """Raises ModelNotReady, ShuttingDown, ModelNotFoundError."""
        with _located("model"):
            return self._served.engine(request.model if request.HasField("model") else None)

    async def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: Context
    ) -> pb.GetStatisticsResponse:
        response = pb.GetStatisticsResponse(
            uptime_seconds=rounded_s(clock.now() - self._started_at),
            calls=self._guard.admission.calls,
            held_bytes=self._guard.held_bytes,
            refused_calls=self._guard.refused,
            stored_images=len(self._images),
            stored_image_bytes=self._images.size_bytes,
            methods=[
                _method_statistics(name, counts)
                for name, counts in sorted(self._calls.methods.items())
            ],
        )
        for engine in self._served.engines:
            stats = engine.stats
            response.running_requests += stats.running
            response.waiting_requests += stats.waiting
            response.pages += stats.pages_total
            response.free_pages += stats.pages_free
            response.cached_pages += stats.pages_cached
            response.preemptions += stats.preemptions
            response.prompt_positions += stats.prompt_positions
            response.cached_positions += stats.cached_positions
        return response


def _method_statistics(method: str, counts: MethodCounts) -> pb.MethodStatistics:
    return pb.MethodStatistics(
        method=method,
        ok_calls=counts.ok,
        failed_calls=counts.failed,
        cancelled_calls=counts.cancelled,
        refused_calls=counts.refused,
        input_tokens=counts.input_tokens,
        output_tokens=counts.output_tokens,
        cached_tokens=counts.cached_tokens,
        total_seconds=rounded_s(counts.total_s),
        preprocess_seconds=rounded_s(counts.preprocess_s),
        queue_seconds=rounded_s(counts.queue_s),
        prefill_seconds=rounded_s(counts.prefill_s),
        decode_seconds=rounded_s(counts.decode_s),
    )


def _find_logger(module: str) -> logging.Logger:
    """The logger of an existing module or package; "" is the root logger. Raises InvalidRequest."""
    if module and module not in logging.root.manager.loggerDict:
        # getLogger would create a logger that is never removed and never used.
        raise InvalidRequest("module", "no module of this name writes logs")
    return logging.getLogger(module)


@contextmanager
def _located(path: str) -> Iterator[None]:
    """Raises errors of a request with the path of the field in the requests of this service."""
    try:
        yield
    except RequestError as error:
        raise LocatedError(error, path) from error


def _log_action(action: str, *arguments: object) -> None:
    """Logs an action of an administrator, with the caller's name."""
    logger.info(f"%s: {action}", current_call().owner or "an administrator", *arguments)
