"""CallStatistics: counts of the calls for inference since the start, by method. GetStatistics returns them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from kestrel_engine import clock

from ..edge.calls.call import Call
from ..service_names import INFERENCE_METHODS
from ..telemetry.attributes import SERVER_ERRORS


@dataclass(slots=True)
class MethodCounts:
    """Calls by outcome. Tokens and seconds are sums over the calls that ended with OK."""

    ok: int = 0
    failed: int = 0
    """Calls that failed by the server's fault or exceeded their deadline."""
    cancelled: int = 0
    refused: int = 0
    """All other calls: invalid, not permitted, or over a limit."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    total_s: float = 0.0
    failed_s: float = 0.0
    """Of the calls that did not end with OK."""
    preprocess_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def count(self, call: Call) -> None:
        if call.code is not grpc.StatusCode.OK:
            self.failed_s += call.duration_ms / 1e3
            if call.code is grpc.StatusCode.CANCELLED:
                self.cancelled += 1
            elif call.code in SERVER_ERRORS:
                self.failed += 1
            else:
                self.refused += 1
            return
        self.ok += 1
        self.total_s += call.duration_ms / 1e3
        if call.result is not None:
            metrics = call.result.metrics
            self.input_tokens += metrics.input_tokens
            self.output_tokens += metrics.output_tokens
            self.cached_tokens += metrics.cached_tokens
            self.preprocess_s += metrics.preprocess_time_ms / 1e3
            self.queue_s += metrics.queue_time_ms / 1e3
            self.prefill_s += metrics.prefill_time_ms / 1e3
            self.decode_s += metrics.decode_time_ms / 1e3


class CallStatistics:
    """Counts calls. The server passes every finished call to ``on_call``."""

    def __init__(self) -> None:
        self.methods: dict[str, MethodCounts] = {}
        """By the method's name, such as "Query". Methods without a call are absent."""
        self._known: dict[str, MethodCounts] = {}
        """The same, by the method's whole name."""
        self.last_at: float | None = None
        """When the last call ended, in seconds since the epoch."""

    def on_call(self, call: Call) -> None:
        counts = self._known.get(call.method)
        if counts is None:
            if not call.method.startswith(INFERENCE_METHODS):
                return
            name = call.method.rpartition("/")[2]
            counts = self._known[call.method] = self.methods.setdefault(name, MethodCounts())
        self.last_at = clock.wall()
        counts.count(call)
