"""Tally: what one stage measured. Those of several processes are added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from .histogram import Histogram

_MOST_KINDS = 20
"""Kinds of errors that are counted separately. The texts of errors may hold anything."""
OTHER_ERRORS = "other errors"


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
    decode: Histogram = field(default_factory=Histogram)
    """By the server's clock, as are ``processing`` and ``queue``."""
    processing: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    lateness: Histogram = field(default_factory=Histogram)
    """How long after its time the client sent a request."""
    by_skill: dict[str, Histogram] = field(default_factory=dict)
    """The latency of each skill."""

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

    def skill(self, name: str) -> Histogram:
        """The latency of a skill's requests."""
        return self.by_skill.setdefault(name, Histogram())

    def merge(self, other: Tally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, int):
                setattr(self, each.name, mine + theirs)
            elif isinstance(mine, Histogram):
                mine.merge(theirs)
        self.errors.update(other.errors)
        for skill, latency in other.by_skill.items():
            self.skill(skill).merge(latency)
