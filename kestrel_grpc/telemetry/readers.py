"""The SDK's readers, with the metrics that do not pass through the SDK's instruments.

These are the histogram of values that occur once per token (DenseHistogram), and the gauge whose attributes change. The
SDK keeps every set of attributes that an instrument has had, and after 2,000 of them it drops the attributes.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, cast

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import Histogram as Instrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import Metric as Collected
from opentelemetry.trace import SpanContext

from .names import SCOPE, Metric

_UNKNOWN = cast(float, None)
"""Exporters omit a minimum or maximum of None."""


class DenseHistogram:
    """A histogram that records many equal values at once, for events that occur once per token.

    The SDK's histogram records one value per call, which takes about 3 microseconds. At 17,000 tokens a second that is
    a twentieth of a core, on the step thread, which must not wait. The readers add this histogram to the SDK's data in
    the SDK's form, so Prometheus and OTLP export it like any other.

    One thread writes, other threads read. A read during a write may miss the group that is being added.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}
        """The newest one of each bucket."""
        self._began_ns = time.time_ns()

    def record(self, value: float, times: int = 1, span: SpanContext | None = None) -> None:
        """``span``: of a sampled call to which the value belongs."""
        bucket = bisect_left(self._metric.buckets, value)
        self._counts[bucket] += times
        self._sum += value * times
        if span is not None:
            now = time.time_ns()
            self._exemplars[bucket] = Exemplar({}, value, now, span.span_id, span.trace_id)

    def point(self) -> HistogramDataPoint:
        """All values since the start."""
        counts = tuple(self._counts)
        return HistogramDataPoint(
            attributes={},
            start_time_unix_nano=self._began_ns,
            time_unix_nano=time.time_ns(),
            count=sum(counts),
            sum=self._sum,
            bucket_counts=counts,
            explicit_bounds=self._metric.buckets,
            min=_UNKNOWN,
            max=_UNKNOWN,
            exemplars=tuple(self._exemplars.copy().values()),
        )

    def collected(
        self,
        point: HistogramDataPoint,
        temporality: AggregationTemporality = AggregationTemporality.CUMULATIVE,
    ) -> Collected:
        """``point`` as the SDK's metric object."""
        metric = self._metric
        data = Histogram([point], temporality)
        return Collected(metric.name, metric.description, metric.unit, data)


class _Reader(MetricReader):
    """Adds ``dense`` and ``changing`` to the SDK's data, once they are set."""

    dense: DenseHistogram | None = None
    changing: Callable[[], Collected] | None = None

    def _receive_metrics(self, metrics_data: MetricsData, *args: Any, **options: Any) -> None:
        added = [] if self.dense is None else [self._next(self.dense)]
        added += [] if self.changing is None else [self.changing()]
        super()._receive_metrics(_with(added, metrics_data), *args, **options)  # type: ignore[safe-super]

    def _next(self, dense: DenseHistogram) -> Collected:
        return dense.collected(dense.point())


class PullReader(_Reader, InMemoryMetricReader):
    """The SDK's in-memory reader."""


class PushReader(_Reader, PeriodicExportingMetricReader):
    """The SDK's exporting reader. Exports differences if OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE asks for
    them for histograms."""

    _before: HistogramDataPoint | None = None
    """The point of the last export."""

    def _next(self, dense: DenseHistogram) -> Collected:
        preferred = self._preferred_temporality or {}
        temporality = preferred.get(Instrument, AggregationTemporality.CUMULATIVE)
        point = dense.point()
        if temporality is AggregationTemporality.CUMULATIVE:
            return dense.collected(point)
        before, self._before = self._before, point
        return dense.collected(point if before is None else _difference(point, before), temporality)


Reader = PullReader | PushReader


def _difference(later: HistogramDataPoint, earlier: HistogramDataPoint) -> HistogramDataPoint:
    pairs = zip(later.bucket_counts, earlier.bucket_counts, strict=True)
    return dataclasses.replace(
        later,
        start_time_unix_nano=earlier.time_unix_nano,
        count=later.count - earlier.count,
        sum=later.sum - earlier.sum,
        bucket_counts=tuple(now - before for now, before in pairs),
    )


def _with(metrics: list[Collected], data: MetricsData) -> MetricsData:
    """``data`` with ``metrics`` added to the scope SCOPE."""
    resources = []
    for resource in data.resource_metrics:
        scopes = [
            dataclasses.replace(scope, metrics=[*scope.metrics, *metrics])
            if scope.scope.name == SCOPE
            else scope
            for scope in resource.scope_metrics
        ]
        resources.append(dataclasses.replace(resource, scope_metrics=scopes))
    return MetricsData(resources)
