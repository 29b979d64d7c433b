"""Percentiles of a histogram against those of the sorted times, and its bounds."""

import math
import random

from hypothesis import strategies as st

from benchmarks.reports.report import quantile
from kestrel_client.commands.bench.histogram import MOST_S, Histogram
from tests.examples import given_examples

TIMES = st.lists(
    st.floats(1e-9, 1e4) | st.floats(1e-9, 1e-3) | st.just(0.0), min_size=1, max_size=50
)
PERCENTS = (1, 50, 90, 99, 99.9, 100)


def recorded(times):
    histogram = Histogram()
    for seconds in times:
        histogram.record(seconds)
    return histogram


@given_examples(30, 500, times=TIMES)
def test_a_percentile_is_a_measured_time_but_for_its_error(times):
    histogram = recorded(times)
    for percent, found in zip(PERCENTS, histogram.percentiles(PERCENTS), strict=True):
        true = quantile(times, percent / 100)
        assert true <= found + 1e-12 and found <= true * 1.004 + 2e-6
    assert histogram.longest_s == max(times)
    assert math.isclose(histogram.percentile(100), max(times), abs_tol=1e-9)
    assert math.isclose(histogram.mean, sum(times) / len(times), abs_tol=1e-9)


def test_memory_is_bounded_however_many_times_are_recorded():
    histogram = Histogram()
    rng = random.Random(0)
    for _ in range(100_000):
        histogram.record(10 ** rng.uniform(-9, 9), times=10**6)
    assert histogram.count == 10**11 and len(histogram.counts) <= 6347


def test_what_is_no_time_counts_as_none_or_as_the_longest():
    histogram = recorded([-1.0, math.nan, math.inf])
    assert histogram.percentile(50) <= 1e-6 and histogram.percentile(99) == MOST_S
    assert math.isnan(Histogram().percentile(50)) and math.isnan(Histogram().mean)
