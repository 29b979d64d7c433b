"""Histogram: times with a bounded relative error in bounded memory, however many are recorded.

The idea is that of HdrHistogram: buckets whose width grows with their value. Its port to Python is not used, because it
needs setuptools and pbr at run time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_LEAST_S, MOST_S = 1e-6, 1e5
"""The least time above 0, and the longest time, 28 hours. A longer time counts as the longest."""
_GROWTH = math.log(1.004)


@dataclass
class Histogram:
    """Times in seconds. A percentile is at most 0.4 % or a microsecond above the measured time, and never below it."""

    counts: Counter[int] = field(default_factory=Counter)
    """How many times were recorded, by bucket. There are at most 6,347 buckets."""
    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def record(self, seconds: float, times: int = 1) -> None:
        """Records a time, ``times`` times. A value that is no time (negative or nan, from a server) counts as 0."""
        seconds = min(seconds, MOST_S) if seconds > 0 else 0.0
        self.counts[math.ceil(math.log(max(seconds / _LEAST_S, 1.0)) / _GROWTH)] += times
        self.count += times
        self.total_s += seconds * times
        self.longest_s = max(self.longest_s, seconds)

    @property
    def mean(self) -> float:
        return self.total_s / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Returns the smallest time that ``percent`` of the times do not exceed (nearest rank); nan without any."""
        (found,) = self.percentiles((percent,))
        return found

    def percentiles(self, percents: Iterable[float]) -> list[float]:
        """As ``percentile``, for several ascending ones in one pass."""
        if not self.count:
            return [math.nan for _ in percents]
        found: list[float] = []
        buckets = iter(sorted(self.counts.items()))
        passed = bucket = 0
        for percent in percents:
            rank = max(1, math.ceil(round(percent / 100 * self.count, 9)))
            while passed < rank:
                bucket, count = next(buckets)
                passed += count
            found.append(min(_LEAST_S * math.exp(bucket * _GROWTH), self.longest_s))
        return found
