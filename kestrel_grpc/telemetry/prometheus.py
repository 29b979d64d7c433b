"""The meter's metrics in Prometheus' form. metrics_port.py serves them at http(s)://HOST:PORT/metrics."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as Collected
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from .names import METRICS, Metric


class Scrape(Collector):
    """Converts what ``reader`` collects to the metric families of prometheus_client. Any thread may read them.
    ``worker``: the index of this worker, which becomes a label of every series; None without workers."""

    def __init__(self, reader: InMemoryMetricReader, worker: int | None = None) -> None:
        self._reader = reader
        self._fixed = {} if worker is None else {"worker": str(worker)}
        self._lock = threading.Lock()  # The reader stores one result, and scrapes may overlap.

    def describe(self) -> list[Family]:
        return []  # Without this method, the registry would collect while it registers this object.

    def collect(self) -> Iterator[Family]:
        with self._lock:
            data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for collected in scope.metrics:
                    if collected.name in METRICS:
                        yield _family(METRICS[collected.name], collected, self._fixed)


def _family(metric: Metric, collected: Collected, fixed: Mapping[str, str]) -> Family:
    """One metric as a metric family. ``fixed``: labels of all series."""
    labels = [*fixed, *(name.replace(".", "_") for name in metric.attributes)]
    first = list(fixed.values())
    data = collected.data
    if isinstance(data, Histogram):
        histogram = HistogramMetricFamily(metric.prometheus_name, metric.description, labels=labels)
        for point in data.data_points:
            histogram.add_metric([*first, *_values(metric, point)], _buckets(point), point.sum)
        return histogram
    assert isinstance(data, (Sum, Gauge)), f"no instrument here returns {type(data).__name__}"
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.prometheus_name, metric.description, labels=labels)
    for number in data.data_points:
        family.add_metric([*first, *_values(metric, number)], number.value)
    return family


def _values(metric: Metric, point: HistogramDataPoint | NumberDataPoint) -> list[str]:
    """The values of the labels, in the metric's order. A missing value is "", which Prometheus treats as absent."""
    attributes = point.attributes or {}
    return [_text(attributes.get(name, "")) for name in metric.attributes]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _buckets(point: HistogramDataPoint) -> list[Any]:
    """Bound and count of each bucket, with its newest exemplar if it has one, which only OpenMetrics' text shows."""
    bounds = [*(str(bound) for bound in point.explicit_bounds), "+Inf"]
    exemplars = {
        bisect_left(point.explicit_bounds, each.value): Exemplar(
            {"trace_id": f"{each.trace_id:032x}", "span_id": f"{each.span_id:016x}"},
            each.value,
            each.time_unix_nano / 1e9,
        )
        for each in sorted(point.exemplars, key=lambda each: each.time_unix_nano)
        if each.trace_id and each.span_id
    }
    counts = zip(bounds, itertools.accumulate(point.bucket_counts), strict=True)
    return [(*pair, exemplars[i]) if i in exemplars else pair for i, pair in enumerate(counts)]
