"""AdminService: drain, cancel, flush, log level, statistics. Owns nothing; who may call it is the guard's business."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceServicer
from kestrel_engine import InvalidRequest

from . import convert
from .errors import LocatedError
from .image_store import ImageStore
from .interceptors import Context, current_call
from .security.admission import Admission
from .served_model import ServedModel

logger = logging.getLogger(__name__)

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}
_NAMES = {level: name for name, level in _LEVELS.items()}


class AdminService(AdminServiceServicer):
    """``drain`` makes the server take no more requests."""

    def __init__(
        self,
        served: ServedModel,
        images: ImageStore,
        admission: Admission,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self._served, self._images, self._admission = served, images, admission
        self._drain = drain
        self._started_at = time.monotonic()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        _tell("drain")
        await self._drain()
        engine = self._served.loaded
        return pb.DrainResponse(remaining_requests=0 if engine is None else engine.num_requests)

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: Context
    ) -> pb.CancelRequestResponse:
        if not convert.valid_request_id(request.request_id):
            error = InvalidRequest(
                "request_id", "must be 1 to 128 visible ASCII characters (! to ~)"
            )
            raise LocatedError(error, "request_id")
        engine = self._served.loaded
        count = 0 if engine is None else engine.cancel(request.request_id)
        _tell("cancel %d requests with id %s", count, request.request_id)
        return pb.CancelRequestResponse(cancelled_requests=count)

    async def FlushCaches(
        self, request: pb.FlushCachesRequest, context: Context
    ) -> pb.FlushCachesResponse:
        engine = self._served.loaded
        if engine is not None:
            engine.flush_caches()
        forgotten = self._images.clear() if request.stored_images else 0
        _tell("flush caches and %d stored pictures", forgotten)
        return pb.FlushCachesResponse(forgotten_images=forgotten)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        level = _LEVELS.get(request.level)
        if level is None:
            raise InvalidRequest("level", "must be DEBUG, INFO, WARNING or ERROR")
        root = logging.getLogger()
        before = _NAMES.get(root.level, pb.LOG_LEVEL_UNSPECIFIED)
        root.setLevel(min(level, logging.INFO))
        _tell("log level %s", logging.getLevelName(level))
        root.setLevel(level)
        return pb.SetLogLevelResponse(previous_level=before)

    async def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: Context
    ) -> pb.GetStatisticsResponse:
        response = pb.GetStatisticsResponse(
            uptime_seconds=time.monotonic() - self._started_at,
            calls=self._admission.calls,
            held_bytes=self._admission.held_bytes,
            refused_calls=self._admission.refused,
            stored_images=len(self._images),
            stored_image_bytes=self._images.size_bytes,
        )
        engine = self._served.loaded
        if engine is not None:
            stats = engine.stats
            response.running_requests = stats.running
            response.waiting_requests = stats.waiting
            response.pages = stats.pages_total
            response.free_pages = stats.pages_free
            response.cached_pages = stats.pages_cached
            response.preemptions = stats.preemptions
            response.prompt_positions = stats.prompt_positions
            response.cached_positions = stats.cached_positions
        return response


def _tell(what: str, *arguments: object) -> None:
    """Who did it goes into the log."""
    logger.info(f"%s: {what}", current_call().owner or "an administrator", *arguments)
