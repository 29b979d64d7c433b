"""The method of gRPC's health protocol. Its generated stub is in a package that the client does without."""

from __future__ import annotations

from typing import Any

from .._pb.kestrel.client.internal.wire_pb2 import HealthCheckRequest, HealthCheckResponse
from .prepared_call import Method


class HealthStub:
    """A stub of grpc.health.v1.Health."""

    def __init__(self, channel: Any) -> None:
        self.Check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )


HEALTH_CHECK = Method(HealthStub, "Check")
