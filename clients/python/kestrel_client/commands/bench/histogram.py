"""Histogram: times with a bounded relative error in bounded memory, however many are recorded.

The idea is that of HdrHistogram: buckets whose width grows with their value. Its port to Python is not used, because it
needs setuptools and pbr at run time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_BITS = 9
"""A bucket is as wide as its values differ after this many binary digits: 1/256 of a value at most."""
_HALF = 1 << (_BITS - 1)
_TICK_S = 1e-6
"""The smallest difference that is seen."""
MOST_S = (2**36 - 1) * _TICK_S
"""The longest time, 19 hours. A longer one is recorded as this."""


@dataclass
class Histogram:
    """Times in seconds. A percentile is at most 0.4 % or a microsecond above the measured time, and never below it."""

    counts: Counter[int] = field(default_factory=Counter)
    """How many times were recorded, by bucket. There are at most 7,424 buckets."""
    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def record(self, seconds: float, times: int = 1) -> None:
        """Records a time, ``times`` times. A value that is no time (negative or nan, from a server) counts as 0."""
        seconds = min(seconds, MOST_S) if seconds > 0 else 0.0
        self.counts[_bucket(seconds)] += times
        self.count += times
        self.total_s += seconds * times
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Histogram) -> None:
        self.counts.update(other.counts)
        self.count += other.count
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)

    @property
    def mean(self) -> float:
        return self.total_s / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Returns the smallest time that ``percent`` of the times do not exceed (nearest rank); nan without any."""
        (found,) = self.percentiles((percent,))
        return found

    def percentiles(self, percents: Iterable[float]) -> list[float]:
        """As ``percentile``, for several ascending ones in one pass."""
        found: list[float] = []
        if not self.count:
            return [math.nan for _ in percents]
        buckets = iter(sorted(self.counts.items()))
        passed, edge_s = 0, 0.0
        for percent in percents:
            rank = max(1, math.ceil(round(percent / 100 * self.count, 9)))
            while passed < rank:
                bucket, count = next(buckets)
                passed, edge_s = passed + count, _edge_s(bucket)
            found.append(min(edge_s, self.longest_s))
        return found


def _bucket(seconds: float) -> int:
    ticks = math.ceil(seconds / _TICK_S - 1e-6)
    shift = max(0, ticks.bit_length() - _BITS)
    return shift * _HALF + (ticks >> shift)


def _edge_s(bucket: int) -> float:
    """The longest time of a bucket."""
    if bucket < 2 * _HALF:
        return bucket * _TICK_S
    shift = bucket // _HALF - 1
    return (((bucket - shift * _HALF + 1) << shift) - 1) * _TICK_S
