"""ServiceMetrics: the instruments of names.METRICS.

Histograms are recorded when calls, requests and steps end. Counters and gauges are plain numbers here or in the engine,
and are read when a reader collects them. Events that occur once per token are recorded in groups.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from kestrel_engine import ImageEvent, InferenceEngine, RequestEvent, StepEvent

from ..edge.calls.call import FRAME_OUTCOMES, Call
from ..logs.records import lost_records
from . import names
from .attributes import SERVER_ERRORS, operation_of
from .dense import DenseHistogram
from .edge_counts import EdgeCounts
from .names import Metric
from .open_files import file_limit, open_files

Read = Callable[[], Iterable[Observation]]

MOST_PRINCIPALS = 100
OTHERS = "other"
"""The label of all principals after the first MOST_PRINCIPALS. It bounds the number of series."""


@dataclass(slots=True)
class _Usage:
    calls: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"input": 0, "output": 0})


class ServiceMetrics:
    """The service's instruments. ``num_calls``: calls in progress. ``is_ready``: whether the server accepts requests.

    These functions and ``edge`` are called from any thread.
    """

    def __init__(
        self,
        meter: Meter,
        num_calls: Callable[[], int],
        is_ready: Callable[[], bool],
        edge: EdgeCounts | None = None,
    ) -> None:
        self._meter = meter
        edge = edge or EdgeCounts()
        self._model: dict[str, str] = {}
        self._load_s = 0.0
        self._steps = {False: 0, True: 0}
        self._crops = self._reused_crops = self._prefill_positions = self._step_tokens = 0
        self.token_gap = DenseHistogram(names.TOKEN_GAP)
        """The readers add this histogram to their data."""
        self._tokens = {"input": 0, "output": 0}
        self._reasoning = self._shared_rows = self._shared_groups = 0
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._principals: dict[str, _Usage] = {}
        self._refused: Counter[str] = Counter()
        self._frames = dict.fromkeys(FRAME_OUTCOMES, 0)
        self._call_duration = self._histogram(names.CALL_DURATION)
        self._request_duration = self._histogram(names.REQUEST_DURATION)
        self._first_token = self._histogram(names.FIRST_TOKEN)
        self._per_token = self._histogram(names.PER_TOKEN)
        self._queue = self._histogram(names.QUEUE_DURATION)
        self._preprocess = self._histogram(names.PREPROCESS_DURATION)
        self._prefill = self._histogram(names.PREFILL_DURATION)
        self._decode = self._histogram(names.DECODE_DURATION)
        self._step_phase = self._histogram(names.STEP_DURATION)
        self._observe(names.CALLS, lambda: [Observation(num_calls())])
        self._observe(names.READY, lambda: [Observation(int(is_ready()))])
        self._observe(names.LOST_RECORDS, lambda: [Observation(lost_records())])
        self._observe(names.CONNECTIONS, lambda: _known(edge.connections()))
        self._observe(names.CONNECTIONS_LIMIT, lambda: _known(edge.max_connections))
        self._observe(
            names.ENDED_CONNECTIONS,
            lambda: [Observation(n, {names.REASON: k}) for k, n in edge.ended().items()],
        )
        self._observe(names.STREAMS, lambda: [Observation(num_calls() + edge.visits())])
        self._observe(names.STREAMS_LIMIT, lambda: _known(edge.max_streams))
        self._observe(names.FILES, lambda: _known(open_files()))
        self._observe(names.FILES_LIMIT, lambda: _known(file_limit()))
        self._observe(names.REQUESTS, self._read_requests)
        self._observe(
            names.TOKENS,
            lambda: [Observation(n, {names.TOKEN_TYPE: k}) for k, n in self._tokens.items()],
        )
        self._observe(
            names.REFUSED_CALLS,
            lambda: [Observation(n, {names.REASON: k}) for k, n in self._refused.copy().items()],
        )
        self._observe(
            names.FRAMES,
            lambda: [Observation(n, {names.OUTCOME: k}) for k, n in self._frames.items()],
        )
        self._observe(names.PRINCIPAL_CALLS, self._read_principals)
        self._observe(names.PRINCIPAL_TOKENS, self._read_principal_tokens)
        self._observe(
            names.STEPS,
            lambda: [Observation(n, {names.FAILED: k}) for k, n in self._steps.items()],
        )
        self._observe(names.REASONING, lambda: [Observation(self._reasoning)])
        self._observe(names.SHARED_ROWS, lambda: [Observation(self._shared_rows)])
        self._observe(names.SHARED_GROUPS, lambda: [Observation(self._shared_groups)])
        self._observe(names.STEP_TOKENS, lambda: [Observation(self._step_tokens)])
        self._observe(names.CROPS, lambda: [Observation(self._crops)])
        self._observe(names.REUSED_CROPS, lambda: [Observation(self._reused_crops)])
        self._observe(names.PREFILL_POSITIONS, lambda: [Observation(self._prefill_positions)])

    def ready(self, engine: InferenceEngine, load_s: float) -> None:
        """Creates the instruments that read the engine. ``load_s``: seconds that loading took."""
        self._load_s = load_s
        self._model = {
            names.OPERATION: names.GENERATE,
            names.PROVIDER: names.PROVIDER_VALUE,
            names.REQUEST_MODEL: engine.info.model,
        }
        # The engine may be unloaded, so the instruments do not keep it.
        held = weakref.ref(engine)

        def observe(
            metric: Metric, read: Callable[[InferenceEngine], Iterable[Observation]]
        ) -> None:
            def read_present() -> Iterable[Observation]:
                present = held()
                return () if present is None else read(present)

            self._observe(metric, read_present)

        observe(names.LOAD_DURATION, lambda engine: [Observation(self._load_s)])
        observe(names.LOAD_PHASE, lambda engine: _load_phases(engine))
        observe(names.KERNELS, lambda engine: _kernels(engine))
        observe(names.COMPILE_TIME, lambda engine: [Observation(engine.compiled.seconds)])
        observe(names.MASKS, lambda engine: [Observation(engine.mask_counts.masks)])
        observe(names.MASK_TIME, lambda engine: [Observation(engine.mask_counts.seconds)])
        observe(names.RUNNING, lambda engine: [Observation(engine.stats.running)])
        observe(names.WAITING, lambda engine: [Observation(_waiting(engine))])
        observe(names.PRINCIPALS, lambda engine: [Observation(engine.places.principals)])
        observe(names.DISPLACED, lambda engine: [Observation(engine.places.displaced)])
        observe(
            names.LARGEST_SHARE,
            lambda engine: [Observation(engine.places.largest_held / engine.places.bound)],
        )
        observe(names.KV_PAGES, lambda engine: _pages(engine))
        at_start = engine.stats  # Positions of the warm-up do not count.
        observe(
            names.PROMPT_POSITIONS,
            lambda engine: [Observation(engine.stats.prompt_positions - at_start.prompt_positions)],
        )
        observe(
            names.CACHED_POSITIONS,
            lambda engine: [Observation(engine.stats.cached_positions - at_start.cached_positions)],
        )
        observe(
            names.PREEMPTIONS,
            lambda engine: [Observation(engine.stats.preemptions - at_start.preemptions)],
        )

    def on_step(self, event: StepEvent) -> None:
        """Records a step. Runs on the step thread."""
        self._steps[event.failed] += 1
        if event.failed:
            return
        self._crops += event.num_crops
        self._reused_crops += event.num_reused_crops
        self._prefill_positions += event.num_prefill_positions
        self._step_tokens += event.num_tokens
        self._shared_rows += sum(event.shared_groups)
        self._shared_groups += len(event.shared_groups)
        for gap_s, count in event.token_gaps:
            self.token_gap.record(gap_s, count)
        if event.num_crops:
            self._step_phase.record(event.vision_s, _VISION)
        if event.num_prefill_positions:
            self._step_phase.record(event.prefill_s, _PREFILL)
        if event.num_decode:
            self._step_phase.record(event.decode_s, _DECODE)

    def on_request(self, event: RequestEvent, model: str | None = None) -> None:
        """``model``: the name of a model that is not the default."""
        metrics, skill = event.metrics, {names.SKILL: event.skill}
        self._requests[event.skill, event.finish_reason or "error", event.error] += 1
        self._tokens["input"] += metrics.input_tokens
        self._tokens["output"] += metrics.output_tokens
        self._reasoning += metrics.reasoning_tokens
        served = {**self._model, **skill, names.OPERATION: operation_of(event.skill)}
        if model is not None:
            served[names.REQUEST_MODEL] = model
        failed = {**served, names.ERROR_TYPE: event.error} if event.error else served
        self._request_duration.record(metrics.total_time_ms / 1e3, failed)
        if event.prepared_at is not None:
            self._preprocess.record(metrics.preprocess_time_ms / 1e3, skill)
        if event.scheduled_at is not None:
            self._queue.record(metrics.queue_time_ms / 1e3, skill)
        if event.first_token_at is None:
            return
        self._first_token.record(metrics.ttft_ms / 1e3, served)
        self._prefill.record(metrics.prefill_time_ms / 1e3, skill)
        self._decode.record(metrics.decode_time_ms / 1e3, skill)
        if metrics.output_tokens > 1:
            self._per_token.record(
                metrics.decode_time_ms / 1e3 / (metrics.output_tokens - 1), served
            )

    def on_image(self, event: ImageEvent) -> None:
        if not event.error:
            self._preprocess.record(event.seconds, _NO_SKILL)

    def on_call(self, call: Call) -> None:
        """Records a finished call."""
        attributes = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_METHOD: call.method.removeprefix("/"),
            names.RPC_STATUS: call.code.name,
        }
        if call.code in SERVER_ERRORS:
            attributes[names.ERROR_TYPE] = call.code.name
        self._call_duration.record(call.duration_ms / 1e3, attributes)
        if call.code in _REFUSALS:
            self._refused[call.reason] += 1
        if call.frame:
            self._frames[call.frame] += 1
        usage = self._usage(call.principal.name)
        usage.calls += 1
        if call.result is not None:
            usage.tokens["input"] += call.result.metrics.input_tokens
            usage.tokens["output"] += call.result.metrics.output_tokens

    def _usage(self, principal: str) -> _Usage:
        usage = self._principals.get(principal)
        if usage is None:
            name = principal if len(self._principals) < MOST_PRINCIPALS else OTHERS
            usage = self._principals.setdefault(name, _Usage())
        return usage

    def _histogram(self, metric: Metric) -> Histogram:
        return self._meter.create_histogram(
            metric.name,
            metric.unit,
            metric.description,
            explicit_bucket_boundaries_advisory=metric.buckets,
        )

    def _observe(self, metric: Metric, read: Read) -> None:
        def called(options: CallbackOptions) -> Iterable[Observation]:
            return read()

        create: Any = (
            self._meter.create_observable_counter
            if metric.kind == "counter"
            else self._meter.create_observable_gauge
        )
        create(metric.name, [called], metric.unit, metric.description)

    def _read_principals(self) -> list[Observation]:
        principals = self._principals.copy().items()
        return [Observation(usage.calls, {names.PRINCIPAL: name}) for name, usage in principals]

    def _read_principal_tokens(self) -> list[Observation]:
        return [
            Observation(count, {names.PRINCIPAL: name, names.TOKEN_TYPE: kind})
            for name, usage in self._principals.copy().items()
            for kind, count in usage.tokens.items()
        ]

    def _read_requests(self) -> list[Observation]:
        observations = []
        for (skill, reason, error), count in self._requests.copy().items():
            attributes = {names.SKILL: skill, names.FINISH_REASON: reason}
            if error:
                attributes[names.ERROR_TYPE] = error
            observations.append(Observation(count, attributes))
        return observations


_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_NO_SKILL = {names.SKILL: ""}
_VISION, _PREFILL, _DECODE = ({names.PHASE: phase} for phase in ("vision", "prefill", "decode"))


def _known(number: int | None) -> list[Observation]:
    """One observation; none for None."""
    return [] if number is None else [Observation(number)]


def _waiting(engine: InferenceEngine) -> int:
    return max(0, engine.num_requests - engine.stats.running)


def _kernels(engine: InferenceEngine) -> list[Observation]:
    counts = engine.compiled
    return [
        Observation(counts.compiled, {names.CACHED: False}),
        Observation(counts.cached, {names.CACHED: True}),
    ]


def _load_phases(engine: InferenceEngine) -> list[Observation]:
    load = engine.info.load
    seconds = {
        "weights": load.weights_s,
        "build": load.build_s,
        "capture": load.capture_s,
        "warm_up": load.warm_up_s,
    }
    return [Observation(value, {names.PHASE: phase}) for phase, value in seconds.items()]


def _pages(engine: InferenceEngine) -> list[Observation]:
    stats = engine.stats
    counts = {
        "free": stats.pages_free,
        "cached": stats.pages_cached,
        "private": stats.pages_held,
    }
    return [Observation(count, {names.PAGE_STATE: state}) for state, count in counts.items()]
