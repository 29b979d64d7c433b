"""ServiceMetrics: the instruments of names.METRICS.

Histograms are recorded when calls, requests and steps end. Counters and gauges are plain numbers here or in the engine,
and are read when a reader collects them. Events that occur once per token are recorded in groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from kestrel_engine import ImageEvent, InferenceEngine, RequestEvent, StepEvent

from ..edge.calls.call import FRAME_OUTCOMES, Call
from ..images.shared.shared_images import SharedImageEvent
from ..logs.records import lost_records
from . import names
from .attributes import SERVER_ERRORS, operation_of
from .dense import DenseHistogram
from .edge_counts import EdgeCounts
from .model_gauges import ModelGauges
from .names import Metric
from .open_files import file_limit, open_files
from .shared_image_metrics import SharedImageMetrics

Read = Callable[[], Iterable[Observation]]

MOST_PRINCIPALS = 100
OTHERS = "other"
"""The label of all principals after the first MOST_PRINCIPALS. It bounds the number of series."""
MOST_ADAPTERS = 50
"""Adapters that have a label of their own; all others are OTHERS."""


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
        self._default = ""
        self._adapters: set[str] = set()
        """Those that have a label of their own."""
        self._steps = {False: 0, True: 0}
        self._crops = self._reused_crops = self._prefill_positions = self._step_tokens = 0
        self.token_gap = DenseHistogram(names.TOKEN_GAP)
        """The readers add this histogram to their data."""
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        self._reasoning = self._shared_rows = self._shared_groups = 0
        self._requests: Counter[tuple[str, str, str, str, str]] = Counter()
        self._principals: dict[str, _Usage] = {}
        self._unauthorized: Counter[str] = Counter()
        self._frames = dict.fromkeys(FRAME_OUTCOMES, 0)
        self._models = ModelGauges(self._observe)
        self.lora_info = self._models.lora_info
        """The readers add this gauge to their data."""
        self._shared_images = SharedImageMetrics(self._observe, self._histogram)
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
        self._observe(names.TOKENS, self._read_tokens)
        self._observe(
            names.UNAUTHORIZED_CALLS,
            lambda: [
                Observation(n, {names.REASON: k}) for k, n in self._unauthorized.copy().items()
            ],
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
        """Shows the engine of the model that is the default at the start. ``load_s``: seconds that loading took."""
        self._default = engine.info.model
        self.add_model(engine, load_s)

    def add_model(self, engine: InferenceEngine, load_s: float) -> None:
        """Shows the engine of a model. ``load_s``: as for ``ready``."""
        self._models.add(engine, load_s)

    def remove_model(self, model: str) -> None:
        self._models.remove(model)

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
        which = model or self._default, self._adapter_label(event.adapter)
        self._requests[(*which, event.skill, event.finish_reason or "error", event.error)] += 1
        self._tokens[(*which, "input")] += metrics.input_tokens
        self._tokens[(*which, "output")] += metrics.output_tokens
        self._reasoning += metrics.reasoning_tokens
        served = {
            names.OPERATION: operation_of(event.skill),
            names.PROVIDER: names.PROVIDER_VALUE,
            names.REQUEST_MODEL: which[0],
            names.ADAPTER: which[1],
            **skill,
        }
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

    def on_shared_image(self, event: SharedImageEvent) -> None:
        self._shared_images.on_event(event)

    def show_shared_images(self, is_used: Callable[[], bool]) -> None:
        self._shared_images.show(is_used)

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
        if call.code in _UNAUTHORIZED:
            self._unauthorized[call.reason] += 1
        if call.frame:
            self._frames[call.frame] += 1
        usage = self._usage(call.principal.name)
        usage.calls += 1
        if call.result is not None:
            usage.tokens["input"] += call.result.metrics.input_tokens
            usage.tokens["output"] += call.result.metrics.output_tokens

    def _adapter_label(self, adapter: str) -> str:
        if adapter and adapter not in self._adapters and len(self._adapters) < MOST_ADAPTERS:
            self._adapters.add(adapter)
        return adapter if not adapter or adapter in self._adapters else OTHERS

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

    def _read_tokens(self) -> list[Observation]:
        return [
            Observation(
                count,
                {names.REQUEST_MODEL: model, names.ADAPTER: adapter, names.TOKEN_TYPE: kind},
            )
            for (model, adapter, kind), count in self._tokens.copy().items()
        ]

    def _read_requests(self) -> list[Observation]:
        observations = []
        for (model, adapter, skill, reason, error), count in self._requests.copy().items():
            attributes = {
                names.REQUEST_MODEL: model,
                names.ADAPTER: adapter,
                names.SKILL: skill,
                names.FINISH_REASON: reason,
            }
            if error:
                attributes[names.ERROR_TYPE] = error
            observations.append(Observation(count, attributes))
        return observations


_UNAUTHORIZED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_NO_SKILL = {names.SKILL: ""}
_VISION, _PREFILL, _DECODE = ({names.PHASE: phase} for phase in ("vision", "prefill", "decode"))


def _known(number: int | None) -> list[Observation]:
    """One observation; none for None."""
    return [] if number is None else [Observation(number)]
