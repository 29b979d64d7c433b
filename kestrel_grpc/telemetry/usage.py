"""Usage: what a request of the engine counts in the metrics of usage and in the usage log."""

from __future__ import annotations

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


def usage_of(event: RequestEvent) -> Usage:
    """The prompt of a request that was never scheduled does not count."""
    metrics, begun = event.metrics, event.scheduled_at is not None
    return Usage(
        1,
        metrics.input_tokens if begun else 0,
        metrics.image_tokens if begun else 0,
        metrics.cached_tokens,
        metrics.output_tokens,
        metrics.device_time_ms / 1e3,
    )
