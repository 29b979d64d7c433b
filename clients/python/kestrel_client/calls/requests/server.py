"""The calls about a server and its models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from ..._pb.kestrel.client.internal import wire_pb2
from ..._pb.kestrel.v1 import model_service_pb2 as model_pb
from ..._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from ...connection import HEALTH_CHECK_METHOD, Connection
from ...values.description import (
    Adapter,
    Model,
    ServerInfo,
    ServerLoad,
    read_adapter,
    read_load,
    read_model,
    read_server_info,
)
from ..prepared import Method, Prepared, prepare

_E = TypeVar("_E")


class HealthStub:
    """A stub of grpc.health.v1.Health. The generated one is in a package that the client does without."""

    def __init__(self, channel: Any) -> None:
        self.Check = channel.unary_unary(
            HEALTH_CHECK_METHOD,
            request_serializer=wire_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=wire_pb2.HealthCheckResponse.FromString,
        )


class ServerRequests:
    """None of these calls is about an image."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list_models(
        self, page_token: str, timeout: float | None
    ) -> Prepared[tuple[list[Model], str]]:
        """A page of models, and the token of the next page; empty on the last page."""

        def read(response: model_pb.ListModelsResponse) -> tuple[list[Model], str]:
            return list(map(read_model, response.models)), response.next_page_token

        request = model_pb.ListModelsRequest(page_token=page_token)
        return self._prepared("ListModels", request, read, timeout)

    def list_adapters(
        self, model: str | None, page_token: str, timeout: float | None
    ) -> Prepared[tuple[list[Adapter], str]]:
        """As list_models."""

        def read(response: model_pb.ListAdaptersResponse) -> tuple[list[Adapter], str]:
            return list(map(read_adapter, response.adapters)), response.next_page_token

        request = model_pb.ListAdaptersRequest(model=model, page_token=page_token)
        return self._prepared("ListAdapters", request, read, timeout)

    def get_model(self, name: str | None, timeout: float | None) -> Prepared[Model]:
        request = model_pb.GetModelRequest(model=name)
        return self._prepared("GetModel", request, lambda r: read_model(r.model), timeout)

    def server_info(self, timeout: float | None) -> Prepared[ServerInfo]:
        request = model_pb.GetServerInfoRequest()
        return self._prepared("GetServerInfo", request, read_server_info, timeout)

    def server_load(self, timeout: float | None) -> Prepared[ServerLoad]:
        return self._prepared("GetLoad", model_pb.GetLoadRequest(), read_load, timeout)

    def is_serving(self, service: str, timeout: float) -> Prepared[bool]:
        """A health check, which waits for a connection. It gives False for a server that does not serve yet."""
        return prepare(
            self._connection,
            Method(HealthStub, "Check"),
            wire_pb2.HealthCheckRequest(service=service),
            lambda response: bool(response.status == wire_pb2.HealthCheckResponse.SERVING),
            timeout=timeout,
            wait_for_ready=True,
        )

    def _prepared(
        self, name: str, request: Message, read: Callable[[Any], _E], timeout: float | None
    ) -> Prepared[_E]:
        method = Method(ModelServiceStub, name, repeatable=True)
        return prepare(self._connection, method, request, read, timeout=timeout)
