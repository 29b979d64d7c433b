"""The plan of a run: Ramp has the load of each stage, Limits say when a server is overloaded, and Slo when a request is
good."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .histogram import Histogram
from .tally import Tally

Loop: TypeAlias = Literal["closed", "open"]
"""Closed: a fixed number of requests is in flight. Open: requests begin at a rate, whether or not others ended."""
_MOST_STAGES = 1000


@dataclass(frozen=True)
class Ramp:
    """The levels of load: requests in flight in a closed loop, requests per second in an open one.

    ``step``: what is added for each stage; None to double the level. ``most``: the last level; None for one stage.
    """

    loop: Loop
    first: float
    step: float | None = None
    most: float | None = None

    def levels(self) -> Iterator[float]:
        """The levels, ascending. The last is exactly ``most``."""
        level, most = self.first, self.first if self.most is None else self.most
        for _ in range(_MOST_STAGES):
            yield level
            if level >= most:
                return
            level = min(2 * level if self.step is None else level + self.step, most)


@dataclass(frozen=True)
class Limits:
    """What a percentile of a stage's times, in seconds, and its share of errors may reach. None: no limit."""

    latency_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    errors: float | None = None
    percentile: float = 95.0

    def passed(self, tally: Tally) -> list[str]:
        """Why the stage was overloaded; empty if it was not."""
        reasons = []
        for what, limit_s, measured in (
            ("latency", self.latency_s, tally.latency),
            ("TTFT", self.ttft_s, tally.ttft),
            ("ITL", self.itl_s, tally.itl),
        ):
            if limit_s is not None and (reason := self._over(what, limit_s, measured)):
                reasons.append(reason)
        if self.errors is not None and tally.error_share > self.errors:
            reasons.append(f"errors {tally.error_share:.1%} > {self.errors:.1%}")
        return reasons

    def _over(self, what: str, limit_s: float, measured: Histogram) -> str | None:
        reached_s = measured.percentile(self.percentile)
        if math.isnan(reached_s) or reached_s <= limit_s:
            return None
        return f"{what} p{self.percentile:g} {1e3 * reached_s:.0f} ms > {1e3 * limit_s:g} ms"


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
