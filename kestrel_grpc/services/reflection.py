"""Server reflection, versions v1 and v1alpha, so that grpcurl, buf curl and their like need no protos.

grpcio-reflection serves v1alpha only; the messages of v1 are the same on the wire, so one servicer answers both names.
"""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as V1ALPHA
from grpc_reflection.v1alpha.reflection import aio  # type: ignore[attr-defined]

V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: tuple[str, ...]) -> None:
    """Describes ``service_names``, health and reflection itself."""
    # v1 has no descriptors here; clients that list it find it described by v1alpha's name.
    servicer = aio.ReflectionServicer(  # type: ignore[attr-defined]
        (*service_names, V1ALPHA)
    )
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),)
    )
