"""The instants at which the requests of an open loop begin. They depend on no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, TypeAlias

Arrivals: TypeAlias = Literal["poisson", "steady"]


def arrival_times(kind: Arrivals, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the start, ascending, without end. ``rate``: requests per second on average.

    "poisson": independent callers; the gaps are exponential. The arrivals of several processes with a share of the rate
    each add up to a Poisson process of the whole rate. "steady": equal gaps after a random first one.
    """
    at = 0.0 if kind == "poisson" else rng.random() / rate - 1 / rate
    while True:
        at += rng.expovariate(rate) if kind == "poisson" else 1 / rate
        yield at
