"""The instants of one request, in two immutable parts. Instants are seconds of the host's monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .events import EngineMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontTimings:
    """The event loop's part: acceptance, and the preparation of the image."""

    accepted_at: float
    preprocess_s: float = 0.0
    """Seconds that a decoder worked on the image."""
    looking_s: float = 0.0
    """Seconds in which other requests looked for the objects that the question presupposes."""
    prepared_at: float | None = None
    """None: the request has no image to prepare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """The step thread's part, made once at the request's end. None: has not happened."""

    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float
    cached_tokens: int = 0
    """KV positions reused from a cache."""
    encoded_crops: int = 0
    """Crops that were encoded for the request."""
    reused_crops: int = 0
    """Crops whose features were kept from earlier images."""
    device_s: float = 0.0
    """Seconds of the device that belong to the request (steps/device_time.py)."""


def together(every: Sequence[StepTimings]) -> StepTimings:
    """Those of a request with one sequence or several."""
    if len(every) == 1:
        return every[0]
    first_tokens = [t.first_token_at for t in every if t.first_token_at is not None]
    last_tokens = [t.last_token_at for t in every if t.last_token_at is not None]
    scheduled = [t.scheduled_at for t in every if t.scheduled_at is not None]
    return StepTimings(
        scheduled_at=min(scheduled, default=None),
        first_token_at=min(first_tokens, default=None),
        last_token_at=max(last_tokens, default=None),
        finished_at=max(t.finished_at for t in every),
        cached_tokens=sum(t.cached_tokens for t in every),
        encoded_crops=sum(t.encoded_crops for t in every),
        reused_crops=sum(t.reused_crops for t in every),
        device_s=sum(t.device_s for t in every),
    )


def metrics_of(
    front: FrontTimings,
    steps: StepTimings,
    *,
    input_tokens: int,
    image_tokens: int = 0,
    cached_image_tokens: int = 0,
    output_tokens: int,
    reasoning_tokens: int = 0,
) -> EngineMetrics:
    """The request's metrics in milliseconds; phases that never began count 0."""
    end = steps.finished_at
    scheduled = steps.scheduled_at if steps.scheduled_at is not None else end
    first = steps.first_token_at if steps.first_token_at is not None else end
    last = steps.last_token_at if steps.last_token_at is not None else first
    queue = max(0.0, scheduled - front.accepted_at - front.preprocess_s - front.looking_s)
    total = end - front.accepted_at
    return EngineMetrics(
        input_tokens=input_tokens,
        image_tokens=image_tokens,
        output_tokens=output_tokens,
        reasoning_tokens=reasoning_tokens,
        cached_tokens=steps.cached_tokens,
        cached_image_tokens=cached_image_tokens,
        encoded_crops=steps.encoded_crops,
        reused_crops=steps.reused_crops,
        device_time_ms=1e3 * steps.device_s,
        queue_time_ms=1e3 * queue,
        preprocess_time_ms=1e3 * front.preprocess_s,
        prefill_time_ms=1e3 * max(0.0, first - scheduled),
        decode_time_ms=1e3 * max(0.0, last - first),
        ttft_ms=1e3 * max(0.0, first - front.accepted_at),
        processing_time_ms=1e3 * max(0.0, total - queue),
        total_time_ms=1e3 * total,
    )
