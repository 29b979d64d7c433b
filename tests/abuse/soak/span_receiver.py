"""SpanReceiver: receives OTLP over gRPC like a collector, and records the calls whose server spans arrived."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Accepts metrics, so that the server logs no export errors."""

    def Export(self, request: Any, context: Any) -> Any:
        return metrics_service_pb2.ExportMetricsServiceResponse()


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """A context manager that runs the receiver. ``endpoint``: the value for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.calls: set[str] = set()
        """Trace ids, hexadecimal, of the server spans."""
        self.num_spans = 0
        # Handlers run in one thread, so the counters need no lock.
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.num_spans += len(scope.spans)
                ends = (span for span in scope.spans if span.kind == Span.SPAN_KIND_SERVER)
                self.calls.update(span.trace_id.hex() for span in ends)
        return pb.ExportTraceServiceResponse()

    def __enter__(self) -> SpanReceiver:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(None)
