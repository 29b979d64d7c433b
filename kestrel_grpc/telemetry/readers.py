"""The SDK's readers, with the metrics that do not pass through the SDK's instruments.

These are the histograms (DenseHistogram), and the gauge whose attributes change. The SDK keeps every set of attributes
that an instrument has had, and after 2,000 of them it drops the attributes.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
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

from .names import ERROR_TYPE, SCOPE, Metric

_UNKNOWN = cast(float, None)
"""Exporters omit a minimum or maximum of None."""


Labels = tuple[str, ...]


class _Series:
    """The values with the same attributes."""

    __slots__ = ("began_ns", "counts", "exemplars", "sum")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The newest one of each bucket."""
        self.began_ns = time.time_ns()


class DenseHistogram:
    """A histogram for what occurs once per call or per token. It records many equal values at once.

    The SDK's histogram records one value per call, which takes 3 microseconds, and 14 with attributes. This one takes
    less than a microsecond. The readers add this histogram to the SDK's data in the SDK's form, so Prometheus and OTLP
    export it like any other.

    A thread for each model writes, other threads read. A read during a write may miss the group that is being added.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric, self._buckets = metric, metric.buckets
        self._series: dict[Labels, _Series] = {}
        if not metric.attributes:
            self._begin(())

    def record(
        self, value: float, labels: Labels = (), *, times: int = 1, span: SpanContext | None = None
    ) -> None:
        """``labels``: the values of the metric's attributes, in its order. ``span``: of a sampled call to which the
        value belongs. A negative value counts as 0: it is a difference of two threads' clocks."""
        self.record_all([value], labels, [span], times=times)

    def record_all(
        self,
        values: Sequence[float],
        labels: Labels = (),
        spans: Sequence[SpanContext | None] = (),
        *,
        times: int = 1,
    ) -> None:
        """As ``record``, for several values. ``spans``: one for each value, or none."""
        if not values:
            return
        series, buckets = self._series.get(labels) or self._begin(labels), self._buckets
        if min(values) < 0.0:
            values = [max(0.0, value) for value in values]
        for value in values:
            series.counts[bisect_left(buckets, value)] += times
        series.sum += sum(values) * times
        if not any(spans):
            return
        for value, span in zip(values, spans, strict=True):
            if span is not None:
                exemplar = Exemplar({}, value, time.time_ns(), span.span_id, span.trace_id)
                series.exemplars[bisect_left(buckets, value)] = exemplar

    def _begin(self, labels: Labels) -> _Series:
        return self._series.setdefault(labels, _Series(len(self._metric.buckets) + 1))

    def points(self) -> dict[Labels, HistogramDataPoint]:
        """All values since the start, by their labels."""
        return {labels: self._point(labels, each) for labels, each in self._series.copy().items()}

    def _point(self, labels: Labels, series: _Series) -> HistogramDataPoint:
        counts = tuple(series.counts)
        return HistogramDataPoint(
            attributes=attributes_of(self._metric, labels),
            start_time_unix_nano=series.began_ns,
            time_unix_nano=time.time_ns(),
            count=sum(counts),
            sum=series.sum,
            bucket_counts=counts,
            explicit_bounds=self._metric.buckets,
            min=_UNKNOWN,
            max=_UNKNOWN,
            exemplars=tuple(series.exemplars.copy().values()),
        )

    def collected(
        self,
        points: Iterable[HistogramDataPoint],
        temporality: AggregationTemporality = AggregationTemporality.CUMULATIVE,
    ) -> Collected:
        """``points`` as the SDK's metric object."""
        metric = self._metric
        data = Histogram([*points], temporality)
        return Collected(metric.name, metric.description, metric.unit, data)


def attributes_of(metric: Metric, values: Iterable[str | bool]) -> dict[str, str | bool]:
    """What did not fail has no type of an error."""
    pairs = zip(metric.attributes, values, strict=True)
    return {name: value for name, value in pairs if value or name != ERROR_TYPE}


class _Reader(MetricReader):
    """Adds ``dense`` and ``changing`` to the SDK's data, once they are set."""

    dense: Sequence[DenseHistogram] = ()
    changing: Callable[[], Collected] | None = None

    def _receive_metrics(self, metrics_data: MetricsData, *args: Any, **options: Any) -> None:
        # As the SDK does, leave out a histogram without values.
        added = [found for each in self.dense if (found := self._next(each)).data.data_points]
        added += [] if self.changing is None else [self.changing()]
        super()._receive_metrics(_with(added, metrics_data), *args, **options)  # type: ignore[safe-super]

    def _next(self, dense: DenseHistogram) -> Collected:
        return dense.collected(dense.points().values())


class PullReader(_Reader, InMemoryMetricReader):
    """The SDK's in-memory reader."""


class PushReader(_Reader, PeriodicExportingMetricReader):
    """The SDK's exporting reader. Exports differences if OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE asks for
    them for histograms."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._before: dict[DenseHistogram, dict[Labels, HistogramDataPoint]] = {}
        """The points of the last export."""
        super().__init__(*args, **options)

    def _next(self, dense: DenseHistogram) -> Collected:
        preferred = self._preferred_temporality or {}
        temporality = preferred.get(Instrument, AggregationTemporality.CUMULATIVE)
        if temporality is AggregationTemporality.CUMULATIVE:
            return super()._next(dense)
        points, before = dense.points(), self._before.get(dense, {})
        self._before[dense] = points
        changes = (
            _difference(point, before[labels]) if labels in before else point
            for labels, point in points.items()
        )
        return dense.collected(changes, temporality)


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
