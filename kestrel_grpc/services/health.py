"""grpc.health.v1.Health: readiness follows the served model. Holds the statuses that Check and Watch report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ..logs.records import log_lifecycle
from ..served_model import ServedModels, State

SERVICE_NAME: str = health.SERVICE_NAME
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Context = grpc.aio.ServicerContext[Any, Any]

POLL_INTERVAL_S = 1.0
"""Seconds between checks of the engine, so the longest delay before health reports a dead step thread."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The server's health. The service name ``""`` stands for the whole server, which follows the default model,
    and a model's name for the model. Some services, such as ModelService, are healthy while the model still loads.

    Replaces the servicer of grpcio-health-checking (1.85), which holds a lock while it writes to a watcher. There, a
    watcher that does not read prevents changes of status and the server's stop.
    """

    def __init__(
        self,
        served: ServedModels,
        is_crowded: Callable[[], bool],
        *,
        following: tuple[str, ...],
        others: tuple[str, ...],
    ) -> None:
        """``is_crowded``: whether the server is about to refuse connections; then ``following`` are not serving.
        ``following``: services that are serving while the model is ready. ``others``: services that are serving from
        the start until the server drains."""
        self._served, self._is_crowded = served, is_crowded
        self._following = {"", *following}
        self._configured: str | None = served.default.name
        """The default model's name before it was loaded, if that is not a model's name."""
        self._models: set[str] = set()
        """The names of all models that were loaded."""
        self._statuses: dict[str, int] = dict.fromkeys(("", *others), _SERVING)
        self._changed = asyncio.Event()
        """Set when a status changes, then replaced by a new event."""
        self._left = False

    def update(self) -> None:
        """Sets the statuses according to the model's state. Call this before the server starts."""
        if self._served.state is State.DRAINING:
            self.leave()
        if self._left:
            return
        ready = self._served.state is State.READY and not self._is_crowded()
        status = _SERVING if ready else _NOT_SERVING
        self._statuses |= dict.fromkeys(self._following, status)
        states = {model.name: model.state for model in self._served if model.loaded is not None}
        # A default model that was named by its path has another name once it is loaded. Watchers may use either name.
        if self._configured in states:
            self._configured = None
        elif self._configured is not None:
            self._statuses[self._configured] = status
        self._models |= states.keys()
        for name in self._models:
            state = states.get(name)  # None: unloaded.
            fine = state is State.READY and (name != self._served.default.name or ready)
            self._statuses[name] = _SERVING if fine else _NOT_SERVING
        self._wake_watchers()

    @property
    def is_serving(self) -> bool:
        """Whether the server as a whole is healthy."""
        return bool(self._statuses[""] == _SERVING)

    def leave(self) -> None:
        """Sets all statuses to NOT_SERVING for good. Later states of the model change nothing."""
        if not self._left:
            self._left = True
            self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()

    async def List(
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self._statuses.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def follow(self) -> None:
        """Waits until the default model's engine fails, then updates and logs that. Runs until then or until it is
        cancelled. Meanwhile, it updates and logs when another model fails."""
        failed: set[str] = set()
        while self._served.state is not State.FAILED:
            now = {model.name for model in self._served if model.state is State.FAILED}
            for name in now - failed:
                log_lifecycle(
                    "failed", model=name, error="its engine has died; the others serve on"
                )
            if now != failed:
                failed = now
                self.update()
            await asyncio.sleep(POLL_INTERVAL_S)
        log_lifecycle("failed", error="the engine has died; restart the server")
        self.update()
