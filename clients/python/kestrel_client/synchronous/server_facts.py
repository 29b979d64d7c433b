# Generated from asynchronous/server_facts.py by generate_sync.py. Never edit; run `make protos`.
"""What the synchronous client learns of its server: models, adapters, limits, load, and whether it is ready."""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf.message import Message

from .._pb.kestrel.client.internal.wire_pb2 import HealthCheckRequest, HealthCheckResponse
from .._pb.kestrel.v1 import model_service_pb2 as model_pb
from .._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from ..calls.health import HEALTH_CHECK
from ..calls.prepared_call import Method
from ..connection import Connection
from ..errors import DeadlineExceededError
from ..values.description import (
    Adapter,
    Model,
    ServerInfo,
    ServerLoad,
    read_adapter,
    read_load,
    read_model,
    read_server_info,
)
from .channel import Closing


class ServerFacts(Closing):
    """The calls that need no image."""

    _connection: Connection

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Returns the models of the server, the default model first."""
        request = model_pb.ListModelsRequest()
        return tuple(read_model(m) for m in self._all("ListModels", request, timeout))

    def get_model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """Returns one model; default: the default model of the server. Raises NotFoundError."""
        request = model_pb.GetModelRequest(model=name)
        return read_model((self._about_server("GetModel", request, timeout)).model)

    def list_adapters(
        self, model: str | None = None, *, timeout: float | None = None
    ) -> tuple[Adapter, ...]:
        """Returns the adapters of a model that the server knows; default: those of the default model."""
        request = model_pb.ListAdaptersRequest(model=model)
        return tuple(read_adapter(a) for a in self._all("ListAdapters", request, timeout))

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Returns the server's versions, limits and capabilities."""
        request = model_pb.GetServerInfoRequest()
        return read_server_info(self._about_server("GetServerInfo", request, timeout))

    def server_load(self, *, timeout: float | None = None) -> ServerLoad:
        """Returns how busy the server is. A client that has several servers can choose by it."""
        return read_load(self._about_server("GetLoad", model_pb.GetLoadRequest(), timeout))

    def wait_ready(self, timeout: float = 60.0, *, service: str = "") -> None:
        """Waits until the server answers requests, by gRPC's health protocol.

        ``timeout``: seconds; raises DeadlineExceededError at their end. ``service``: the name of one gRPC service, or
        "" for the whole server.
        """
        deadline = time.monotonic() + timeout
        request = HealthCheckRequest(service=service)
        while (left := deadline - time.monotonic()) > 0:
            try:
                # Waits for a connection, too.
                health = self._channel.ask(HEALTH_CHECK, request, left, wait_for_ready=True)
            except DeadlineExceededError:
                break
            if health.status == HealthCheckResponse.SERVING:
                return
            time.sleep(min(0.1, left))
        raise DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the server at {self._connection.target} was not ready within {timeout:g} s",
        )

    def _about_server(self, name: str, request: Message, timeout: float | None) -> Any:
        method = Method(ModelServiceStub, name, repeatable=True)
        return self._channel.ask(method, request, timeout)

    def _all(self, name: str, request: Any, timeout: float | None) -> list[Any]:
        """The items of all pages of a list."""
        found: list[Any] = []
        while True:
            page = self._about_server(name, request, timeout)
            found += page.models if name == "ListModels" else page.adapters
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token
