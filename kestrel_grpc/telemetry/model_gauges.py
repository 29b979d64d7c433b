"""ModelGauges: the instruments that read the engines of all models when a reader collects them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics.export import Gauge, NumberDataPoint
from opentelemetry.sdk.metrics.export import Metric as Collected

from kestrel_engine import InferenceEngine, SchedulerStats

from . import names
from .names import METRICS

Observe = Callable[[str, Callable[[], Iterable[Observation]]], None]
"""Creates an instrument that calls a function for its values."""
Values = Iterable[tuple[float, dict[str, str | bool]]]
"""Values with the attributes that the model's name comes to."""

_MOST_NAMES = 64
"""Names of adapters in a label."""


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """``engine`` is not kept: a model may be unloaded. ``at_start``: positions of the warm-up do not count."""

    engine: weakref.ref[InferenceEngine]
    load_s: float
    at_start: SchedulerStats


class ModelGauges:
    """Reads engines from any thread. Without a model, the instruments have no values."""

    def __init__(self, observe: Observe) -> None:
        self._models: dict[str, _Model] = {}
        self._observe = observe
        self._each("kestrel.model.load.duration", lambda engine, model: [(model.load_s, {})])
        self._each("kestrel.model.load.phase.duration", lambda engine, model: _load_phases(engine))
        self._each("kestrel.kv.pages", lambda engine, model: _pages(engine))
        self._each("kestrel.adapters.memory", lambda engine, model: _adapter_memory(engine))
        self._each("kestrel.adapters.loads", lambda engine, model: _adapter_loads(engine))
        for name, read in _NUMBERS.items():
            self._number(name, read)
        self._since_start("kestrel.prompt.positions", lambda stats: stats.prompt_positions)
        self._since_start(
            "kestrel.prefix_cache.hit.positions", lambda stats: stats.cached_positions
        )
        self._since_start("kestrel.preemptions", lambda stats: stats.preemptions)
        # One compiler serves the engines of all models.
        observe("kestrel.kernels", self._kernels)
        observe("kestrel.kernels.compile.time", self._compile_time)

    def add(self, engine: InferenceEngine, load_s: float) -> None:
        """Shows the engine from now on, in place of an earlier one of its name. ``load_s``: seconds to load it."""
        models = {name: each for name, each in self._models.items() if each.engine() is not None}
        models[engine.info.model] = _Model(weakref.ref(engine), load_s, engine.stats)
        self._models = models

    def remove(self, model: str) -> None:
        """Shows the model no longer: it was unloaded."""
        self._models = {name: each for name, each in self._models.items() if name != model}

    def lora_info(self) -> Collected:
        """LORA_INFO now. No instrument, because its attributes change with the loaded adapters (readers.py)."""
        metric, now = METRICS["kestrel.lora_requests_info"], time.time_ns()
        points = [
            NumberDataPoint(_lora_labels(engine), now, now, now / 1e9)
            for engine, _ in self._present()
        ]
        return Collected(metric.name, metric.description, metric.unit, Gauge(points))

    def _present(self) -> list[tuple[InferenceEngine, _Model]]:
        pairs = ((model.engine(), model) for model in self._models.values())
        return [(engine, model) for engine, model in pairs if engine is not None]

    def _each(self, name: str, read: Callable[[InferenceEngine, _Model], Values]) -> None:
        def observed() -> list[Observation]:
            return [
                Observation(value, {names.REQUEST_MODEL: engine.info.model, **attributes})
                for engine, model in self._present()
                for value, attributes in read(engine, model)
            ]

        self._observe(name, observed)

    def _number(self, name: str, read: Callable[[InferenceEngine], float]) -> None:
        self._each(name, lambda engine, model: [(read(engine), {})])

    def _since_start(self, name: str, count: Callable[[SchedulerStats], int]) -> None:
        self._each(name, lambda engine, model: [(count(engine.stats) - count(model.at_start), {})])

    def _kernels(self) -> list[Observation]:
        return [
            Observation(count, {names.CACHED: cached})
            for engine, _ in self._present()[:1]
            for cached, count in ((False, engine.compiled.compiled), (True, engine.compiled.cached))
        ]

    def _compile_time(self) -> list[Observation]:
        return [Observation(engine.compiled.seconds) for engine, _ in self._present()[:1]]


def _load_phases(engine: InferenceEngine) -> Values:
    load = engine.info.load
    seconds = {
        "weights": load.weights_s,
        "build": load.build_s,
        "capture": load.capture_s,
        "warm_up": load.warm_up_s,
    }
    return [(value, {names.PHASE: phase}) for phase, value in seconds.items()]


def _pages(engine: InferenceEngine) -> Values:
    stats = engine.stats
    counts = {"free": stats.pages_free, "cached": stats.pages_cached, "private": stats.pages_held}
    return [(count, {names.PAGE_STATE: state}) for state, count in counts.items()]


def _lora_labels(engine: InferenceEngine) -> dict[str, str]:
    counts = engine.adapter_counts
    return {
        names.REQUEST_MODEL: engine.info.model,
        names.MAX_LORA: str(counts.most),
        names.RUNNING_LORA: _named(counts.loaded),
        names.WAITING_LORA: _named(counts.loading),
    }


def _named(adapters: Sequence[str]) -> str:
    return ",".join(adapters[:_MOST_NAMES])


def _adapter_memory(engine: InferenceEngine) -> Values:
    counts = engine.adapter_counts
    by_kind = {"device": counts.num_bytes, "host": counts.host_bytes}
    return [(count, {names.MEMORY_KIND: kind}) for kind, count in by_kind.items()]


def _adapter_loads(engine: InferenceEngine) -> Values:
    counts = engine.adapter_counts
    return [(counts.loads, {names.FAILED: False}), (counts.failures, {names.FAILED: True})]


_NUMBERS: dict[str, Callable[[InferenceEngine], float]] = {
    "kestrel.masks": lambda engine: engine.mask_counts.masks,
    "kestrel.masks.time": lambda engine: engine.mask_counts.seconds,
    "kestrel.requests.running": lambda engine: engine.stats.running,
    "kestrel.requests.waiting": lambda engine: max(0, engine.num_requests - engine.stats.running),
    "kestrel.principals.active": lambda engine: engine.places.principals,
    "kestrel.requests.displaced": lambda engine: engine.places.displaced,
    "kestrel.places.largest": lambda engine: engine.places.largest_held / engine.places.bound,
    "kestrel.kv.usage": lambda engine: engine.stats.kv_use,
    "kestrel.adapters.loaded": lambda engine: len(engine.adapter_counts.loaded),
    "kestrel.adapters.used": lambda engine: engine.adapter_counts.used,
}
"""Instruments with one value for each model."""
