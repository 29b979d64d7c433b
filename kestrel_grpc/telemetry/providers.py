"""Creates OpenTelemetry's providers from the configuration, and shuts them down within a time limit.

The SDK and the exporters read samplers, resources, endpoints, headers, certificates and timeouts from OTEL_* variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from .. import __version__
from ..settings.telemetry import Exporter, Protocol, TelemetryConfig
from .readers import PullReader, PushReader, Reader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tracers:
    """The providers of spans. OTEL_TRACES_SAMPLER configures the sampler of ``requests``. ``steps`` samples every span,
    because only sampled requests create spans of steps."""

    requests: TracerProvider
    steps: TracerProvider
    processors: list[BatchSpanProcessor]
    """One for each exporter."""

    @property
    def shutdowns(self) -> list[Callable[[], object]]:
        """Export the remaining spans. Each blocks as long as its collector does."""
        return [each.shutdown for each in self.processors]


def resource() -> Resource:
    """The resource of all spans and metrics. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override its attributes."""
    defaults = {"service.name": "kestrel-grpc", "service.version": __version__}
    return Resource.create(defaults).merge(OTELResourceDetector().detect())


def tracers(config: TelemetryConfig) -> Tracers:
    processors = [
        BatchSpanProcessor(
            _exporter("Span", each, config.traces_protocol),
            max_queue_size=config.span_queue,
            schedule_delay_millis=config.span_delay_ms,
        )
        for each in config.traces
    ]
    shared = resource()
    requests = TracerProvider(resource=shared, shutdown_on_exit=False)
    steps = TracerProvider(sampler=ALWAYS_ON, resource=shared, shutdown_on_exit=False)
    for processor in processors:
        requests.add_span_processor(processor)
        steps.add_span_processor(processor)
    return Tracers(requests, steps, processors)


def meters(config: TelemetryConfig, pull: PullReader | None) -> tuple[MeterProvider, list[Reader]]:
    """The provider of metrics and its readers. ``pull``: the Prometheus endpoint's reader, or None."""
    readers: list[Reader] = [] if pull is None else [pull]
    readers += [
        PushReader(_exporter("Metric", each, config.metrics_protocol)) for each in config.metrics
    ]
    every: list[MetricReader] = [*readers]
    return MeterProvider(every, resource=resource(), shutdown_on_exit=False), readers


async def within(timeout_s: float, *steps: Callable[[], object]) -> bool:
    """Runs each of the blocking ``steps`` in a daemon thread. Returns whether all finished in ``timeout_s`` seconds."""
    loop = asyncio.get_running_loop()
    left = [loop.create_future() for _ in steps]

    def run(step: Callable[[], object], done: asyncio.Future[None]) -> None:
        try:
            step()
        except Exception:  # No caller sees exceptions of this thread, and the other steps must run.
            logger.exception("a shutdown of telemetry failed")
        # If the loop has ended, no task waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set_result, None)

    for pair in zip(steps, left, strict=True):
        threading.Thread(target=run, args=pair, name="kestrel-telemetry-end", daemon=True).start()
    _, unfinished = await asyncio.wait(left, timeout=timeout_s)
    return not unfinished


def _exporter(what: Literal["Span", "Metric"], exporter: Exporter, protocol: Protocol) -> Any:
    """An exporter to the console, or by OTLP: a class of the package of the protocol, grpc or http."""
    if exporter == "console":
        return ConsoleSpanExporter() if what == "Span" else ConsoleMetricExporter()
    package = "grpc" if protocol == "grpc" else "http"
    module = "trace_exporter" if what == "Span" else "metric_exporter"
    otlp = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}")
    return getattr(otlp, f"OTLP{what}Exporter")()
