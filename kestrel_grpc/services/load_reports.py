"""xds.service.orca.v3.OpenRcaService: a stream of load reports for a balancer, beside the calls (out-of-band ORCA).

The stubs are not generated: xds-protos overwrites modules of other packages, and the request has one field that counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from ..edge.methods import Methods
from ..service_names import LOAD_REPORT_SERVICE

SHORTEST_INTERVAL_S = 1.0
"""Shortest time between two reports of a stream. A shorter one that the request asks for becomes this."""
_LONGEST_INTERVAL_S = 3600.0


def add_load_reports(methods: Methods, report: Callable[[], bytes]) -> None:
    """Adds the service. ``report``: makes an encoded OrcaLoadReport."""

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        wanted_s = request.report_interval.seconds + request.report_interval.nanos / 1e9
        interval_s = min(max(wanted_s, SHORTEST_INTERVAL_S), _LONGEST_INTERVAL_S)
        while True:  # Until the caller or the server ends the call.
            yield report()
            await asyncio.sleep(interval_s)

    handler = grpc.unary_stream_rpc_method_handler(
        stream, request_deserializer=_request_class().FromString, response_serializer=None
    )
    methods.add_registered_method_handlers(LOAD_REPORT_SERVICE, {"StreamCoreMetrics": handler})


def _request_class() -> Any:
    """xds.service.orca.v3.OrcaLoadReportRequest without request_cost_names: a report has no costs of requests."""
    pool = descriptor_pool.DescriptorPool()
    duration = duration_pb2.DESCRIPTOR
    pool.AddSerializedFile(duration.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="orca_request.proto",
        package="xds.service.orca.v3",
        syntax="proto3",
        dependency=[duration.name],
    )
    message = file.message_type.add(name="OrcaLoadReportRequest")
    kinds = descriptor_pb2.FieldDescriptorProto
    message.field.add(
        name="report_interval",
        number=1,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_OPTIONAL,
        type_name=".google.protobuf.Duration",
    )
    pool.Add(file)
    found = pool.FindMessageTypeByName("xds.service.orca.v3.OrcaLoadReportRequest")
    return message_factory.GetMessageClass(found)
