"""LoadMeter: measures how busy this server is: requests, pages, rates of the last seconds, CPU and memory.

GetLoad and the load reports in trailers read it. It needs no telemetry, and runs on the event loop.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kestrel_engine import SchedulerStats, clock, host_total, processors

from ..edge.calls.call import Call
from ..served_model import ServedModels, State
from ..service_names import INFERENCE_METHODS

WINDOW_S = 10
"""Seconds over which rates are averaged: short enough to show a burst, long enough to smooth single requests."""

_CPU_EVERY_S = 1.0
_RESIDENT = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A snapshot of the load: the sums over all models, and the default model's state. The engines' figures are 0 until
    the models are ready."""

    state: State
    stats: SchedulerStats
    waiting: int
    """Accepted requests that are not in the batch. Requests whose images are being decoded count, so this number may be
    larger than the scheduler's."""
    max_running: int
    max_waiting: int
    tokens_per_s: float
    """Output tokens of finished calls."""
    requests_per_s: float
    """Finished calls of VisionService."""
    errors_per_s: float
    """Finished calls of VisionService that failed by the server's fault."""
    cpu: float
    """Used share of the processors that the process may use; in [0, 1]."""
    memory: float
    """Resident share of the memory that the process may use; in [0, 1]; 0 if the system does not report it."""

    @property
    def utilization(self) -> float:
        """Requests divided by places in the batch. Above 1, requests wait. 0 until a model is loaded."""
        return (self.stats.running + self.waiting) / max(self.max_running, 1)

    @property
    def kv_use(self) -> float:
        """Share of the pages that requests use. Cached prefixes that none uses do not count: requests may take them."""
        return self.stats.kv_use


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    errors: int = 0
    tokens: int = 0


class LoadMeter:
    """Measures the load. The server passes every finished call to ``on_call``."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)
        self._started_at = clock.now()
        self._processors = processors()
        self._memory_bytes = host_total() or 0
        self._cpu = 0.0
        self._cpu_seen = (clock.now(), time.process_time())

    def on_call(self, call: Call) -> None:
        if not call.method.startswith(INFERENCE_METHODS):
            return
        number = int(clock.now())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        second = self._seconds[-1]
        second.requests += 1
        second.errors += call.error is not None
        second.tokens += call.result.metrics.output_tokens if call.result is not None else 0

    def read(self) -> Load:
        now, engines = clock.now(), self._served.engines
        # A model that is loaded while others serve takes no requests yet.
        models = [each for each in self._served if each.loaded] or list(self._served)
        stats = _sum([engine.stats for engine in engines])
        first = int(now) - WINDOW_S + 1
        recent = [second for second in self._seconds if second.number >= first]
        span_s = max(1.0, min(now - first, now - self._started_at))
        return Load(
            state=self._served.state,
            stats=stats,
            waiting=max(0, self._served.num_requests - stats.running),
            max_running=sum(
                (model.config.max_batch_size or 0)
                if model.loaded is None
                else model.loaded.info.max_batch_size
                for model in models
            ),
            max_waiting=sum(model.config.max_queue for model in models),
            tokens_per_s=sum(second.tokens for second in recent) / span_s,
            requests_per_s=sum(second.requests for second in recent) / span_s,
            errors_per_s=sum(second.errors for second in recent) / span_s,
            cpu=self._read_cpu(now),
            memory=min(1.0, _resident() / self._memory_bytes) if self._memory_bytes else 0.0,
        )

    def _read_cpu(self, now: float) -> float:
        seen_at, seen_s = self._cpu_seen
        if now - seen_at >= _CPU_EVERY_S:
            used_s = time.process_time()
            self._cpu = min(1.0, (used_s - seen_s) / (now - seen_at) / self._processors)
            self._cpu_seen = (now, used_s)
        return self._cpu


def _sum(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """The sums of the counts of several models."""
    names = [field.name for field in fields(SchedulerStats)]
    return SchedulerStats(**{name: sum(getattr(each, name) for each in stats) for name in names})


def _resident() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(_RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
