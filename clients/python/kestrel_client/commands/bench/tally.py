"""Tally: what one stage measured. Slo: when a request is good."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .histogram import Histogram

_MOST_KINDS = 20
"""Kinds of errors that are counted separately. The texts of errors may hold anything."""
OTHER_ERRORS = "other errors"
TIMES = ("latency", "ttft", "itl", "decode_latency", "processing_latency", "queue_latency")
OVERLOAD_SHARE = 0.05
"""A stage in which a larger share of the requests is not good is overloaded."""


@dataclass(frozen=True)
class Slo:
    """The service level objective: the limits of each single request, in seconds. ``itl_s``: of its mean gap. None: no
    limit."""

    latency_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None

    def is_met(self, latency_s: float, ttft_s: float | None, itl_s: float | None) -> bool:
        """None: the request has no such time."""
        return all(
            limit is None or time is None or time <= limit
            for limit, time in (
                (self.latency_s, latency_s),
                (self.ttft_s, ttft_s),
                (self.itl_s, itl_s),
            )
        )


@dataclass
class Tally:
    """The requests of the stage's window, and what ended in the window."""

    total: int = 0
    """Requests of the window: answered, failed, and not sent."""
    succeeded: int = 0
    good: int = 0
    """Requests that succeeded within the objective."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed requests by the first line of their error."""
    ended: int = 0
    """Answers that arrived in the window, also to requests that began before it. This is the throughput."""
    ended_good: int = 0
    input_tokens: int = 0
    """Of the answers that arrived in the window, like ``output_tokens`` and ``cached_tokens``."""
    output_tokens: int = 0
    cached_tokens: int = 0
    latency: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    decode_latency: Histogram = field(default_factory=Histogram)
    """By the server's clock, as are the two that follow."""
    processing_latency: Histogram = field(default_factory=Histogram)
    queue_latency: Histogram = field(default_factory=Histogram)
    lateness: Histogram = field(default_factory=Histogram)
    """How long after its time the client sent a request."""
    by_skill: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    """The latency of each skill's requests."""

    @property
    def failed(self) -> int:
        return self.total - self.succeeded

    @property
    def is_overloaded(self) -> bool:
        return self.good < (1 - OVERLOAD_SHARE) * self.total

    def fail(self, reason: str) -> None:
        self.total += 1
        known = reason in self.errors or len(self.errors) < _MOST_KINDS
        self.errors[reason if known else OTHER_ERRORS] += 1
