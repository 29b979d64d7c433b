"""The result of a call that several requests of the engine answer, for the access log and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_engine import EngineMetrics, EngineResult


def total_result(request_id: str, metrics: Sequence[EngineMetrics]) -> EngineResult:
    """Returns the sums of tokens, the longest queue time and the earliest first token."""
    total = EngineMetrics(
        input_tokens=sum(m.input_tokens for m in metrics),
        output_tokens=sum(m.output_tokens for m in metrics),
        reasoning_tokens=sum(m.reasoning_tokens for m in metrics),
        cached_tokens=sum(m.cached_tokens for m in metrics),
        encoded_crops=sum(m.encoded_crops for m in metrics),
        reused_crops=sum(m.reused_crops for m in metrics),
        queue_time_ms=max((m.queue_time_ms for m in metrics), default=0.0),
        ttft_ms=min((m.ttft_ms for m in metrics), default=0.0),
    )
    return EngineResult(request_id=request_id, output={}, finish_reason="stop", metrics=total)
