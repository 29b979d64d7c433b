"""The SDK's readers, with the metrics that do not pass through the SDK's instruments.

These are the histogram of values that occur once per token, and the gauge whose attributes change. The SDK keeps every
set of attributes that an instrument has had, and after 2,000 of them it drops the attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.metrics import Histogram as Instrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import Metric as Collected

from .dense import DenseHistogram
from .names import SCOPE

Collect = Callable[[], Collected]


class PullReader(InMemoryMetricReader):
    """The SDK's in-memory reader, with ``dense`` and ``changing`` added to its data."""

    dense: DenseHistogram | None = None
    changing: Collect | None = None

    def _receive_metrics(self, metrics_data: MetricsData, *args: Any, **options: Any) -> None:
        if self.dense is not None:
            metrics_data = _with(self.dense.collected(), metrics_data)
        if self.changing is not None:
            metrics_data = _with(self.changing(), metrics_data)
        super()._receive_metrics(metrics_data, *args, **options)


class PushReader(PeriodicExportingMetricReader):
    """The SDK's exporting reader, with ``dense`` and ``changing`` added to its data.

    Exports differences if OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE asks for them for histograms.
    """

    dense: DenseHistogram | None = None
    changing: Collect | None = None
    _before: HistogramDataPoint | None = None
    """The point of the last export."""

    def _receive_metrics(self, metrics_data: MetricsData, *args: Any, **options: Any) -> None:
        if self.dense is not None:
            metrics_data = _with(self._next(self.dense), metrics_data)
        if self.changing is not None:
            metrics_data = _with(self.changing(), metrics_data)
        super()._receive_metrics(metrics_data, *args, **options)

    def _next(self, dense: DenseHistogram) -> Collected:
        preferred = self._preferred_temporality or {}
        temporality = preferred.get(Instrument, AggregationTemporality.CUMULATIVE)
        point = dense.point()
        if temporality is AggregationTemporality.CUMULATIVE:
            return dense.as_metric(point, temporality)
        before, self._before = self._before, point
        return dense.as_metric(point if before is None else _difference(point, before), temporality)


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


def _with(metric: Collected, data: MetricsData) -> MetricsData:
    """``data`` with ``metric`` added to the scope SCOPE."""
    resources = []
    for resource in data.resource_metrics:
        scopes = [
            dataclasses.replace(scope, metrics=[*scope.metrics, metric])
            if scope.scope.name == SCOPE
            else scope
            for scope in resource.scope_metrics
        ]
        resources.append(dataclasses.replace(resource, scope_metrics=scopes))
    return MetricsData(resources)
