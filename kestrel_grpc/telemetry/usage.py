"""Usage: what requests of the engine count in the metrics of usage and in the usage log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kestrel_engine import RequestEvent


class Usage(NamedTuple):
    """Sums over requests that have ended."""

    requests: int = 0
    input_tokens: int = 0
    """Positions of prompts, with those of images and those reused from a cache."""
    image_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Also of requests that were cancelled; 0 of requests that failed."""
    device_s: float = 0.0
    """Seconds of the device (kestrel_engine/steps/device_time.py)."""

    def plus(self, other: Usage) -> Usage:
        return Usage._make(a + b for a, b in zip(self, other, strict=True))


def usage_of(events: Sequence[RequestEvent]) -> Usage:
    """The sums over ``events``. The prompt of a request that was never scheduled does not count."""
    every = [event.metrics for event in events]
    begun = [event.metrics for event in events if event.scheduled_at is not None]
    return Usage(
        len(every),
        sum([each.input_tokens for each in begun]),
        sum([each.image_tokens for each in begun]),
        sum([each.cached_tokens for each in every]),
        sum([each.output_tokens for each in every]),
        sum([each.device_time_ms for each in every]) / 1e3,
    )
