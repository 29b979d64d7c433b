"""Health by grpc.health.v1: readiness follows the served model. Owns the statuses that Check and Watch tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ..logs.records import tell_lifecycle
from ..served_model import ServedModel, State

SERVICE_NAME: str = health.SERVICE_NAME
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Context = grpc.aio.ServicerContext[Any, Any]

POLL_INTERVAL_S = 1.0
"""How often the engine's life is looked at: a dead step thread shows this much later."""


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The library's holds a lock while it writes to a watcher (grpcio-health-checking 1.85): one who doesn't read would
    keep the statuses from changing, and the server from stopping."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Event()
        """Set when a status changes, and then replaced."""
        self._left = False

    def set(self, service: str, status: int) -> None:
        if not self._left:
            self._told[service] = status
            self._tell()

    def leave(self) -> None:
        """All are NOT_SERVING from now on."""
        if not self._left:
            self._left = True
            self._told = dict.fromkeys(self._told, _NOT_SERVING)
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._told.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._told.get(request.service, _SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()

    async def List(
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self._told.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)


class Health:
    """``""`` stands for the whole server, the model's name for the model. The model service answers while the model
    loads, and says so."""

    def __init__(
        self,
        served: ServedModel,
        is_crowded: Callable[[], bool],
        *,
        following: tuple[str, ...],
        others: tuple[str, ...],
    ) -> None:
        """Those ``following`` are ready when the model is, unless ``is_crowded``: new connections are about to fail.
        ``others`` are ready from the start, until the server drains."""
        self._served, self._is_crowded = served, is_crowded
        self._following = {"", *following}
        self._others = others
        self._servicer = _Servicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def start(self) -> None:
        """To be called before the server starts."""
        for name in self._others:
            self._servicer.set(name, _SERVING)
        self.update()

    def update(self) -> None:
        """Brings the statuses in line with the model's state."""
        if self._served.state is State.DRAINING:
            self.leave()
            return
        ready = self._served.state is State.READY and not self._is_crowded()
        status = _SERVING if ready else _NOT_SERVING
        # A path's name is known once it is loaded; who asked by the path goes on.
        self._following.add(self._served.name)
        for name in self._following:
            self._servicer.set(name, status)

    def leave(self) -> None:
        """All are NOT_SERVING from now on, whatever the model's state."""
        self._servicer.leave()

    async def follow(self) -> None:
        """Watches over the engine until it fails or this task is cancelled."""
        while self._served.state is not State.FAILED:
            await asyncio.sleep(POLL_INTERVAL_S)
        tell_lifecycle("failed", error="the engine has died; a restart is needed")
        self.update()
