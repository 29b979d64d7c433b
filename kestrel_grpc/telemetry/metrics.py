"""ServiceMetrics: the instruments of METRICS (names.py).

Histograms are recorded when calls, requests and steps end. Counters and gauges are plain numbers here or in the engine,
and are read when a reader collects them. Events that occur once per token are recorded in groups. Calls and requests
are kept until there are many, and those with equal labels are counted together. To count each alone takes four times as
long, and a call of a server whose metrics nobody reads would cost 5 % more.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import SpanContext

from kestrel_engine import EngineMetrics, ImageEvent, InferenceEngine, RequestEvent, StepEvent

from ..edge.calls.call import FRAME_OUTCOMES, Call
from ..images.shared.shared_images import SharedImageEvent
from ..logs.records import lost_records
from ..security.admission.guard import Guard
from . import names
from .attributes import SERVER_ERRORS, operation_of
from .model_gauges import ModelGauges
from .names import METRICS
from .open_files import file_limit, open_files
from .readers import DenseHistogram, attributes_of
from .usage import usage_of

logger = logging.getLogger(__name__)

Read = Callable[[], Iterable[Observation]]
_Labels = tuple[Any, ...]
_Ended = TypeVar("_Ended")

_AT_ONCE = 128
"""Ended calls, and ended requests, that are counted together. They take 0.3 ms if most have the same labels."""
MOST_PRINCIPALS = 100
OTHERS = "other"
"""The label of all principals after the first MOST_PRINCIPALS. It bounds the number of series."""
MOST_USERS = 1000
"""Combinations of principal, model and adapter that have a series of their own in the metrics of usage."""
MOST_ADAPTERS = 50
"""Adapters that have a label of their own; all others are OTHERS."""


class ServiceMetrics:
    """The service's instruments. ``num_calls``: calls in progress. ``is_ready``: whether the server accepts requests.

    ``guard`` counts connections and calls; ``ended`` returns the connections that the server ended, by reason. These
    functions are called from any thread.
    """

    def __init__(
        self,
        meter: Meter,
        num_calls: Callable[[], int],
        is_ready: Callable[[], bool],
        guard: Guard | None = None,
        ended: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._meter = meter
        self._default = ""
        self._calls: deque[tuple[_Labels, tuple[float, EngineMetrics | None]]] = deque()
        self._finished: deque[tuple[_Labels, tuple[RequestEvent, SpanContext | None]]] = deque()
        """The calls and requests that are not counted yet, by what their labels depend on."""
        self._counting = threading.Lock()
        self._adapters: set[str] = set()
        """Those that have a label of their own."""
        self.histograms: list[DenseHistogram] = []
        """The readers add these histograms to their data, and the gauge ``lora_info``."""
        self._models = ModelGauges(self._observe)
        self.lora_info = self._models.lora_info
        self._steps = self._counts("kestrel.steps", False, True)
        self._crops = self._counts("kestrel.crops")
        self._reused_crops = self._counts("kestrel.crops.reused")
        self._prefill_positions = self._counts("kestrel.prefill.positions")
        self._step_tokens = self._counts("kestrel.step.tokens")
        self._shared_rows = self._counts("kestrel.step.shared.rows")
        self._shared_groups = self._counts("kestrel.step.shared.groups")
        self._requests = self._counts("kestrel.requests")
        self._tokens = self._counts("kestrel.tokens")
        self._reasoning = self._counts("kestrel.tokens.reasoning")
        self._principal_calls = self._counts("kestrel.principal.calls")
        self._principal_tokens = self._counts("kestrel.principal.tokens")
        self._usage_tokens = self._counts("kestrel.usage.tokens")
        self._device_time = self._counts("kestrel.usage.device_time")
        self._users: set[tuple[str, str, str]] = set()
        self._unauthorized = self._counts("kestrel.calls.unauthorized")
        self._frames = self._counts("kestrel.frames", *FRAME_OUTCOMES)
        self._shared_images = self._counts("kestrel.shared_images.operations")
        self._shared_image_bytes = self._counts("kestrel.shared_images.transferred")
        self._shared_image_duration = self._histogram("kestrel.shared_images.duration")
        self._call_duration = self._histogram("rpc.server.call.duration")
        self._request_duration = self._histogram("gen_ai.server.request.duration")
        self._first_token = self._histogram("gen_ai.server.time_to_first_token")
        self._per_token = self._histogram("gen_ai.server.time_per_output_token")
        self._queue = self._histogram("kestrel.request.queue.duration")
        self._preprocess = self._histogram("kestrel.request.preprocess.duration")
        self._prefill = self._histogram("kestrel.request.prefill.duration")
        self._decode = self._histogram("kestrel.request.decode.duration")
        self._step_phase = self._histogram("kestrel.step.phase.duration")
        self._token_gap = self._histogram("kestrel.token.gap.duration")
        self._read("kestrel.calls.active", num_calls)
        self._read("kestrel.ready", lambda: int(is_ready()))
        self._read("kestrel.log.lost", lost_records)
        self._observe(
            "kestrel.connections.ended",
            lambda: [Observation(n, {names.REASON: k}) for k, n in ended().items()],
        )
        if guard is not None:
            self._observe("kestrel.budget.exceeded", lambda: _exceeded(guard))
            limits = guard.security.connections
            self._read("kestrel.connections.open", lambda: guard.connections.num_connections)
            self._read("kestrel.connections.limit", lambda: limits.connections)
            self._read("kestrel.streams.open", lambda: num_calls() + guard.visits.num_calls)
            self._read("kestrel.streams.limit", lambda: limits.streams)
        self._read("kestrel.files.open", open_files)
        self._read("kestrel.files.limit", file_limit)

    def ready(self, engine: InferenceEngine, load_s: float) -> None:
        """Shows the engine of the model that is the default at the start. ``load_s``: seconds that loading took."""
        self._default = engine.info.model
        self.add_model(engine, load_s)

    def add_model(self, engine: InferenceEngine, load_s: float) -> None:
        """Shows the engine of a model. ``load_s``: as for ``ready``."""
        self._models.add(engine, load_s)

    def remove_model(self, model: str) -> None:
        self._models.remove(model)

    def on_step(self, event: StepEvent, span: SpanContext | None = None) -> None:
        """Records a step. ``span``: that of a call whose token came after the step's gap. Runs on the step thread."""
        self._steps[event.failed,] += 1
        if event.failed:
            return
        self._crops[()] += event.num_crops
        self._reused_crops[()] += event.num_reused_crops
        self._prefill_positions[()] += event.num_prefill_positions
        self._step_tokens[()] += event.num_tokens
        self._shared_rows[()] += sum(event.shared_groups)
        self._shared_groups[()] += len(event.shared_groups)
        for gap_s, count in event.token_gaps:
            self._token_gap.record(gap_s, times=count, span=span)
        if event.num_crops:
            self._step_phase.record(event.vision_s, _VISION)
        if event.num_prefill_positions:
            self._step_phase.record(event.prefill_s, _PREFILL)
        if event.num_decode:
            self._step_phase.record(event.decode_s, _DECODE)

    def on_request(
        self, event: RequestEvent, model: str | None = None, span: SpanContext | None = None
    ) -> None:
        """``model``: the name of a model that is not the default. ``span``: that of a sampled call, which becomes an
        exemplar."""
        who = event.principal, model or self._default, event.adapter
        what = event.skill, event.finish_reason, event.error
        self._finished.append(((*who, *what), (event, span)))
        if len(self._finished) >= _AT_ONCE:
            self._count_ended()

    def _count_requests(
        self,
        labels: _Labels,
        ended: Sequence[tuple[RequestEvent, SpanContext | None]],
    ) -> None:
        who, model, adapter, skill, reason, error = labels
        adapter = self._adapter_label(adapter)
        events = [event for event, _ in ended]
        metrics = [event.metrics for event in events]
        self._requests[model, adapter, skill, reason or "error", error] += len(events)
        self._tokens[model, adapter, "input"] += sum([each.input_tokens for each in metrics])
        self._tokens[model, adapter, "output"] += sum([each.output_tokens for each in metrics])
        self._reasoning[()] += sum([each.reasoning_tokens for each in metrics])
        self._count_usage((who, model, adapter), events)
        served = (operation_of(skill), names.PROVIDER_VALUE, model, skill, adapter)
        durations = [each.total_time_ms / 1e3 for each in metrics]
        self._request_duration.record_all(durations, (*served, error))
        prepared = [e.metrics.preprocess_time_ms for e in events if e.prepared_at is not None]
        self._preprocess.record_all([each / 1e3 for each in prepared], (skill,))
        queued = [e.metrics.queue_time_ms / 1e3 for e in events if e.scheduled_at is not None]
        self._queue.record_all(queued, (skill,))
        ended = [each for each in ended if each[0].first_token_at is not None]
        metrics, spans = [event.metrics for event, _ in ended], [span for _, span in ended]
        self._first_token.record_all([each.ttft_ms / 1e3 for each in metrics], served, spans)
        self._prefill.record_all([each.prefill_time_ms / 1e3 for each in metrics], (skill,))
        self._decode.record_all([each.decode_time_ms / 1e3 for each in metrics], (skill,))
        long = [
            (each, span)
            for each, span in zip(metrics, spans, strict=True)
            if each.output_tokens > 1
        ]
        per_token = [each.decode_time_ms / 1e3 / (each.output_tokens - 1) for each, _ in long]
        self._per_token.record_all(per_token, served, [span for _, span in long])

    def _count_usage(self, user: tuple[str, str, str], events: Sequence[RequestEvent]) -> None:
        used = usage_of(events)
        if user not in self._users and len(self._users) >= MOST_USERS:
            user = (OTHERS, user[1], OTHERS)
        self._users.add(user)
        self._usage_tokens[(*user, "input")] += used.input_tokens
        self._usage_tokens[(*user, "image")] += used.image_tokens
        self._usage_tokens[(*user, "cached")] += used.cached_tokens
        self._usage_tokens[(*user, "output")] += used.output_tokens
        self._device_time[user] += used.device_s  # type: ignore[assignment]

    def on_image(self, event: ImageEvent) -> None:
        if not event.error:
            self._preprocess.record(event.seconds, _NO_SKILL)

    def on_shared_image(self, event: SharedImageEvent) -> None:
        self._shared_images[event.operation, event.outcome] += 1
        if event.num_bytes:
            self._shared_image_bytes[event.operation,] += event.num_bytes
        if event.outcome not in _NOT_TRIED:
            self._shared_image_duration.record(event.seconds, (event.operation,))

    def show_audit(self, waiting: Callable[[], int]) -> None:
        self._read("kestrel.audit.waiting", waiting)

    def show_shared_images(self, is_used: Callable[[], bool]) -> None:
        self._read("kestrel.shared_images.used", lambda: int(is_used()))

    def on_call(self, call: Call) -> None:
        """Records a finished call."""
        metrics = None if call.result is None else call.result.metrics
        what = call.method, call.code, call.reason, call.frame, call.principal.name
        self._calls.append((what, (call.duration_ms / 1e3, metrics)))
        if len(self._calls) >= _AT_ONCE:
            self._count_ended()

    def _count_calls(
        self, labels: _Labels, ended: Sequence[tuple[float, EngineMetrics | None]]
    ) -> None:
        method, status, reason, frame, who = labels
        code = status.name
        error = code if status in SERVER_ERRORS else ""
        seconds = [duration_s for duration_s, _ in ended]
        self._call_duration.record_all(seconds, ("grpc", method.removeprefix("/"), code, error))
        if status in _UNAUTHORIZED:
            self._unauthorized[reason,] += len(ended)
        if frame:
            self._frames[frame,] += len(ended)
        if (who,) not in self._principal_calls and len(self._principal_calls) >= MOST_PRINCIPALS:
            who = OTHERS
        used = [metrics for _, metrics in ended if metrics is not None]
        self._principal_calls[who,] += len(ended)
        self._principal_tokens[who, "input"] += sum([each.input_tokens for each in used])
        self._principal_tokens[who, "output"] += sum([each.output_tokens for each in used])

    def _count_ended(self) -> None:
        with self._counting:
            _count_groups(self._calls, self._count_calls)
            _count_groups(self._finished, self._count_requests)

    def _adapter_label(self, adapter: str) -> str:
        if adapter and adapter not in self._adapters and len(self._adapters) < MOST_ADAPTERS:
            self._adapters.add(adapter)
        return adapter if not adapter or adapter in self._adapters else OTHERS

    def _histogram(self, name: str) -> DenseHistogram:
        histogram = DenseHistogram(METRICS[name])
        self.histograms.append(histogram)
        return histogram

    def _observe(self, name: str, read: Read) -> None:
        metric = METRICS[name]

        def called(options: CallbackOptions) -> Iterable[Observation]:
            self._count_ended()
            return read()

        create: Any = (
            self._meter.create_observable_counter
            if metric.kind == "counter"
            else self._meter.create_observable_gauge
        )
        create(metric.name, [called], metric.unit, metric.description)

    def _read(self, name: str, read: Callable[[], float | None]) -> None:
        """An instrument with one value, or with none while ``read`` returns None."""

        def observed() -> list[Observation]:
            value = read()
            return [] if value is None else [Observation(value)]

        self._observe(name, observed)

    def _counts(self, name: str, *known: str | bool) -> Counter[tuple[str | bool, ...]]:
        """Numbers by the values of the metric's attributes. ``known``: the values of an only attribute that are shown
        before they occur. An only number is shown from the start; its key is ()."""
        metric, counts = METRICS[name], Counter[tuple[str | bool, ...]]()
        for value in known:
            counts[value,] = 0
        if not metric.attributes:
            counts[()] = 0

        def observed() -> list[Observation]:
            return [
                Observation(count, attributes_of(metric, values))
                for values, count in counts.copy().items()
            ]

        self._observe(name, observed)
        return counts


def _taken(waiting: deque[tuple[_Labels, _Ended]]) -> dict[_Labels, list[_Ended]]:
    """What waits, by its labels. Other threads may add to it."""
    groups: defaultdict[_Labels, list[_Ended]] = defaultdict(list)
    while waiting:
        labels, ended = waiting.popleft()
        groups[labels].append(ended)
    return groups


def _count_groups(
    waiting: deque[tuple[_Labels, _Ended]], count: Callable[[_Labels, Sequence[_Ended]], None]
) -> None:
    for labels, ended in _taken(waiting).items():
        try:
            count(labels, ended)
        except Exception:  # The other groups count all the same, and no call ends by it.
            logger.exception("metrics of %d that ended are lost: %s", len(ended), labels)


def _exceeded(guard: Guard) -> list[Observation]:
    return [
        Observation(count, {names.PRINCIPAL: principal, names.WINDOW: window})
        for (principal, window), count in guard.budgets.exceeded.copy().items()
    ]


_UNAUTHORIZED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_NO_SKILL = ("",)
_VISION, _PREFILL, _DECODE = ("vision",), ("prefill",), ("decode",)

_NOT_TRIED = ("paused", "full")
