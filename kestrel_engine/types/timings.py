"""When things happened to one request. Instants are seconds of the scheduler's clock (monotonic)."""

from __future__ import annotations

from dataclasses import dataclass

from .events import EngineMetrics


@dataclass(slots=True)
class RequestTimings:
    """Filled in by those who do the work, read once at the end. ``None``: has not happened."""

    accepted_at: float
    preprocess_s: float = 0.0
    prepared_at: float | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def metrics(
        self, *, input_tokens: int, output_tokens: int, cached_tokens: int = 0
    ) -> EngineMetrics:
        """The request's metrics in milliseconds; phases that never began count 0."""
        end = self.finished_at if self.finished_at is not None else self.accepted_at
        scheduled = self.scheduled_at if self.scheduled_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        last = self.last_token_at if self.last_token_at is not None else first
        queue = max(0.0, scheduled - self.accepted_at - self.preprocess_s)
        total = end - self.accepted_at
        return EngineMetrics(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            queue_time_ms=1e3 * queue,
            preprocess_time_ms=1e3 * self.preprocess_s,
            prefill_time_ms=1e3 * max(0.0, first - scheduled),
            decode_time_ms=1e3 * max(0.0, last - first),
            ttft_ms=1e3 * max(0.0, first - self.accepted_at),
            processing_time_ms=1e3 * max(0.0, total - queue),
            total_time_ms=1e3 * total,
        )
