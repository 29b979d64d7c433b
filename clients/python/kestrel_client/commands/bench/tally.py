"""Tally: what one stage measured. Those of several processes are added up."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .histogram import Histogram

_MOST_KINDS = 20
"""Kinds of errors that are counted separately. The texts of errors may hold anything."""
OTHER_ERRORS = "other errors"
TIMES = ("latency", "ttft", "itl", "decode_latency", "processing_latency", "queue_latency")
_COUNTS = (
    *("total", "succeeded", "good", "ended", "ended_good"),
    *("input_tokens", "output_tokens", "cached_tokens"),
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
    def error_share(self) -> float:
        return self.failed / self.total if self.total else 0.0

    def fail(self, reason: str) -> None:
        self.total += 1
        known = reason in self.errors or len(self.errors) < _MOST_KINDS
        self.errors[reason if known else OTHER_ERRORS] += 1

    def merge(self, other: Tally) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in (*TIMES, "lateness"):
            getattr(self, name).merge(getattr(other, name))
        self.errors.update(other.errors)
        for skill, latency in other.by_skill.items():
            self.by_skill[skill].merge(latency)
