"""AdminService: drain, cancel, flush, log level, statistics, profiles and captures.

The service holds no state. The guard (security/admission) decides who may call it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import text_format

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceServicer
from kestrel_engine import InvalidRequest, clock

from ..edge.calls.call import Context, valid_request_id
from ..edge.calls.current import current
from ..edge.messages.fields import checked_model_name, in_range
from ..images.store import ImageStore
from ..model_changes import Loading, ModelChanges
from ..monitoring.call_statistics import CallStatistics, MethodCounts
from ..monitoring.capture import DEFAULT_REQUESTS, MAX_REQUESTS, Capture
from ..monitoring.profiles import DEFAULT_MS, DEFAULT_STEPS, MAX_MS, MAX_STEPS, MIN_MS, Profiles
from ..security.admission.guard import Guard
from ..served_model import ServedModels
from .model import adapter_message, named_model

logger = logging.getLogger(__name__)

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}
_MOST_GRACE_MS = 86_400_000
_NAMES = {level: name for name, level in _LEVELS.items()}


class AdminService(AdminServiceServicer):
    """``drain``: makes the server refuse new requests and then stop. ``grace_s``: for an unloaded model's requests."""

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
        before = {"state": self._served.state.value}
        await self._drain()
        _changed(before, state=self._served.state.value)
        return pb.DrainResponse(remaining_requests=self._served.num_requests)

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: Context
    ) -> pb.CancelRequestResponse:
        if not valid_request_id(request.request_id):
            raise InvalidRequest("request_id", "must be 1 to 128 visible ASCII characters (! to ~)")
        count = sum(engine.cancel(request.request_id) for engine in self._served.engines)
        _changed({}, cancelled_requests=count)
        return pb.CancelRequestResponse(cancelled_requests=count)

    async def FlushCaches(
        self, request: pb.FlushCachesRequest, context: Context
    ) -> pb.FlushCachesResponse:
        for engine in self._served.engines:
            await engine.flush_caches()
        stored = len(self._images)
        removed = self._images.clear() if request.stored_images else 0
        _changed({"stored_images": stored}, stored_images=stored - removed)
        return pb.FlushCachesResponse(deleted_images=removed)

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
        _changed({"level": pb.LogLevel.Name(before)}, level=pb.LogLevel.Name(request.level))
        module_logger.setLevel(level)
        return pb.SetLogLevelResponse(previous_level=before)

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        duration_ms = in_range(request, "duration_ms", MIN_MS, MAX_MS, DEFAULT_MS)
        steps = in_range(request, "steps", 1, MAX_STEPS, DEFAULT_STEPS)
        file = await self._profiles.start(
            self._served.default.loaded,
            seconds=duration_ms / 1e3,
            steps=steps,
            python_functions=request.python_functions,
        )
        _changed({"file": None}, file=file)
        return pb.StartProfileResponse(file=file)

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: Context
    ) -> pb.StopProfileResponse:
        profile = await self._profiles.stop()
        file = os.path.basename(profile.path)
        _changed({}, file=file, size_bytes=profile.file_bytes)
        return pb.StopProfileResponse(
            file=file,
            size_bytes=profile.file_bytes,
            duration_ms=_rounded_ms(profile.seconds),
            steps=profile.steps,
        )

    async def StartCapture(
        self, request: pb.StartCaptureRequest, context: Context
    ) -> pb.StartCaptureResponse:
        requests = in_range(request, "requests", 1, MAX_REQUESTS, DEFAULT_REQUESTS)
        self._capture.start(requests, images=request.images)
        _changed({}, requests=requests, images=request.images)
        return pb.StartCaptureResponse(requests=requests)

    async def StopCapture(
        self, request: pb.StopCaptureRequest, context: Context
    ) -> pb.StopCaptureResponse:
        files, lost = await self._capture.stop()
        _changed({}, requests=0, files=files, lost=lost)
        return pb.StopCaptureResponse(files=files, lost=lost)

    async def LoadModel(  # type: ignore[override]
        self, request: pb.LoadModelRequest, context: Context
    ) -> None:
        events = self._models.load(
            request.source, request.settings, make_default=request.make_default
        )
        before = {"models": self._served.names}
        _changed(before, loading=request.source)  # It goes on if the caller leaves.
        await current.get().accept()
        async for event in events:
            if isinstance(event, Loading):
                progress = pb.LoadingProgress(step=event.step, done=event.done, total=event.total)
                await context.write(pb.LoadModelResponse(progress=progress))
            else:
                _changed(before, models=self._served.names)
                final = pb.LoadedModel(model=event.name, load_ms=_rounded_ms(event.seconds))
                await context.write(pb.LoadModelResponse(final=final))

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        name = checked_model_name(request.model)
        grace_ms = in_range(request, "grace_ms", 0, _MOST_GRACE_MS, round(1e3 * self._grace_s))
        before = {"models": self._served.names}
        ended = self._models.unload(name, grace_ms / 1e3)
        _changed(before, unloading=name)  # It goes on if the caller leaves.
        await ended
        _changed(before, models=self._served.names)
        return pb.UnloadModelResponse()

    async def SetDefaultModel(
        self, request: pb.SetDefaultModelRequest, context: Context
    ) -> pb.SetDefaultModelResponse:
        name = checked_model_name(request.model)
        previous = self._models.make_default(name)
        _changed({"default_model": previous}, default_model=name)
        return pb.SetDefaultModelResponse(previous_model=previous)

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        engine = named_model(self._served, request).engine
        was_loaded = request.adapter in engine.adapter_counts.loaded
        num_bytes = await engine.load_adapter(request.adapter)
        _changed({"loaded": was_loaded}, loaded=True)
        return pb.LoadAdapterResponse(adapter=adapter_message(request.adapter, num_bytes))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        engine = named_model(self._served, request).engine
        was_loaded = engine.unload_adapter(request.adapter)
        _changed({"loaded": was_loaded}, loaded=False)
        return pb.UnloadAdapterResponse(was_loaded=was_loaded)

    async def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: Context
    ) -> pb.GetStatisticsResponse:
        response = pb.GetStatisticsResponse(
            uptime_ms=_rounded_ms(clock.now() - self._started_at),
            calls=self._guard.admission.calls,
            held_bytes=self._guard.held_bytes,
            limited_calls=self._guard.limited,
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
        total_ms=_rounded_ms(counts.total_s),
        preprocess_ms=_rounded_ms(counts.preprocess_s),
        queue_ms=_rounded_ms(counts.queue_s),
        prefill_ms=_rounded_ms(counts.prefill_s),
        decode_ms=_rounded_ms(counts.decode_s),
    )


def _find_logger(module: str) -> logging.Logger:
    """The logger of an existing module or package; "" is the root logger. Raises InvalidRequest."""
    if module and module not in logging.root.manager.loggerDict:
        # getLogger would create a logger that is never removed and never used.
        raise InvalidRequest("module", "no module of this name writes logs")
    return logging.getLogger(module)


def _rounded_ms(duration_s: float) -> float:
    return round(1e3 * duration_s, 3)


def _changed(before: dict[str, Any], **after: Any) -> None:
    """Logs what the current call has changed, and notes it for the audit log."""
    call = current.get()
    call.change = before, after
    who, action = call.owner or "an administrator", call.method.rpartition("/")[2]
    asked = text_format.MessageToString(call.message, as_one_line=True)[:200]
    logger.info("%s: %s -> %s", who, f"{action} {asked}".rstrip(), after)
