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

POLL_INTERVAL_S = 1.0
"""How often the engine's life is looked at: a dead step thread shows this much later."""


class _Servicer(health.aio.HealthServicer):  # type: ignore[misc, name-defined]
    """The library's, whose List raises (grpcio-health-checking 1.85)."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        self._told[service] = status
        await super().set(service, status)

    async def enter_graceful_shutdown(self) -> None:
        self._told = dict.fromkeys(self._told, _NOT_SERVING)
        await super().enter_graceful_shutdown()

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
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

    async def start(self) -> None:
        """To be called before the server starts."""
        for name in self._others:
            await self._servicer.set(name, _SERVING)
        await self.update()

    async def update(self) -> None:
        """Brings the statuses in line with the model's state."""
        if self._served.state is State.DRAINING:
            await self.leave()
            return
        ready = self._served.state is State.READY and not self._is_crowded()
        status = _SERVING if ready else _NOT_SERVING
        # A path's name is known once it is loaded; who asked by the path goes on.
        self._following.add(self._served.name)
        for name in self._following:
            await self._servicer.set(name, status)

    async def leave(self) -> None:
        """All are NOT_SERVING from now on, whatever the model's state."""
        await self._servicer.enter_graceful_shutdown()

    async def follow(self) -> None:
        """Watches over the engine until it fails or this task is cancelled."""
        while self._served.state is not State.FAILED:
            await asyncio.sleep(POLL_INTERVAL_S)
        tell_lifecycle("failed", error="the engine has died; a restart is needed")
        await self.update()
