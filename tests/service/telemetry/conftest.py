"""A collector in a process of its own, and what it has received."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kestrel_grpc.settings.telemetry import TelemetryConfig, missing_packages

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

EVERYTHING = (
    TelemetryConfig(traces=("otlp",), metrics=("otlp",), metrics_protocol="http/protobuf"),
    TelemetryConfig(prometheus="127.0.0.1:0"),
)
collect_ignore_glob = ["test_*.py"] if any(map(missing_packages, EVERYTHING)) else []
"""What is tested here is optional."""


@dataclass
class Collector:
    grpc_port: int
    http_port: int
    exports: list[tuple[str, bytes]] = field(default_factory=list)

    def clear(self) -> None:
        self.exports.clear()

    def spans(self) -> list[Span]:
        """In the order of their start."""
        found = []
        for export in self._traces():
            for resource in export.resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))

    def resource(self) -> dict[str, str]:
        resource = self._traces()[0].resource_spans[0].resource
        return {a.key: a.value.string_value for a in resource.attributes}

    def _traces(self) -> list[ExportTraceServiceRequest]:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        return [
            pb.ExportTraceServiceRequest.FromString(data)
            for signal, data in self.exports
            if signal.endswith("-traces")
        ]

    def metrics(self) -> list[list[Metric]]:
        """Of each export."""
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb

        return [
            [
                metric
                for resource in pb.ExportMetricsServiceRequest.FromString(data).resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            ]
            for signal, data in self.exports
            if signal.endswith("-metrics")
        ]

    def metric_names(self) -> set[str]:
        return {metric.name for metrics in self.metrics() for metric in metrics}


@pytest.fixture(autouse=True)
def no_exporter_outlives_its_test() -> Iterator[None]:
    """A server gives its exporters up after a bounded time; they go on trying to reach a collector that isn't there,
    and what they meet then must not befall another test."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("Otel", "kestrel-telemetry")):
            thread.join(60)


@pytest.fixture(scope="session")
def collector_process() -> Iterator[Collector]:
    path = Path(__file__).with_name("collector.py")
    process = subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    grpc_port, http_port = map(int, process.stdout.readline().split())
    collector = Collector(grpc_port, http_port)

    def read(lines) -> None:
        for line in lines:
            signal, data = line.split()
            collector.exports.append((signal, base64.b64decode(data)))

    reader = threading.Thread(target=read, args=(process.stdout,))
    reader.start()
    yield collector
    process.stdin.close()
    process.wait(60)
    reader.join(60)
    process.stdout.close()


@pytest.fixture
def collector(collector_process, monkeypatch) -> Collector:
    """Empty, and named by OTEL_EXPORTER_OTLP_ENDPOINT (gRPC)."""
    collector_process.clear()
    endpoint = f"http://127.0.0.1:{collector_process.grpc_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    return collector_process
