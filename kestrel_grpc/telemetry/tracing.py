"""CallTracing: one trace per call, built from timestamps when the call has ended.

The call's own span begins with the call, so that its ids are known. All spans below it are made when the call has
ended, from the engine's events. A call that is not sampled costs nothing, and no span is made while requests are
computed. ``on_step`` runs on the step thread, all other methods on the event loop.

    kestrel.v1.VisionService/Query                 SERVER, child of the caller's traceparent
    ├─ generate_content MODEL                      one per request of the engine; Analyze makes several
    │  ├─ image.preprocess
    │  ├─ queue
    │  ├─ vision.encode                            links to the steps that encoded
    │  ├─ prefill                                  links to its steps
    │  └─ decode                                   links to one step in a hundred
    ├─ image.preprocess                            for Analyze and ImageService, which prepare an image separately
    └─ postprocess                                 from the last token to the last message

A step serves many requests, so its span is not a child of theirs. The span has its own trace, and the spans of the
requests link to it. It is made when the first request that links to it ends. Only some steps get a span: the first
KEPT_STEPS of a sampled call, and then one step in DECODE_SAMPLING.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

import grpc
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer, format_trace_id
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from kestrel_engine import EngineInfo, ImageEvent, RequestEvent, StepEvent, clock

from ..edge.calls.call import Call
from . import attributes, names

DECODE_SAMPLING = 100
"""After KEPT_STEPS steps of a call, one step in this many is recorded."""
KEPT_STEPS = 16
LINKED_STEPS = 8
MOST_STEPS = 64
"""Limit on the recorded steps of one call."""
_NO_PARENT = Context()
_HEADER = "traceparent"
_UNSAMPLED = re.compile(
    "00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]", re.ASCII
)
"""The traceparent of a caller that does not record its trace. Most callers send such a header, so it is recognised
without creating objects."""
_FOLLOWING = "remoteParentNotSampled:AlwaysOffSampler"
"""The description of a sampler contains this if the sampler samples no call of such a caller."""
_EVENTS = {
    grpc.StatusCode.CANCELLED: names.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: names.DEADLINE_EXCEEDED,
}


@dataclass(slots=True, eq=False)
class StepRecord:
    """A recorded step. ``began_at``: when the device began the step. The device runs steps in the order of launch."""

    event: StepEvent
    began_at: float
    requests: list[SpanContext] = field(default_factory=list)
    """The spans of the sampled calls that the step worked for."""
    context: SpanContext | None = None
    """The step's span; None until it is made."""

    @property
    def vision_end(self) -> float:
        return min(self.began_at + self.event.vision_s, self.event.collected_at)

    @property
    def is_sampled(self) -> bool:
        return self.event.step_id % DECODE_SAMPLING == 0


@dataclass(slots=True, eq=False)
class CallTrace:
    """A sampled call in progress."""

    span: Span
    context: SpanContext
    begun_at: float
    """Seconds of the monotonic clock, like all instants here."""
    clock_ns: int
    """Nanoseconds since the epoch minus nanoseconds of the monotonic clock."""
    request_id: str = ""
    requests: list[RequestEvent] = field(default_factory=list)
    images: list[ImageEvent] = field(default_factory=list)
    """Images that were prepared before their requests."""
    steps: list[StepRecord] = field(default_factory=list)
    info: EngineInfo | None = None
    """Of the model that answers, unless it is the default."""

    def ns(self, instant: float) -> int:
        """``instant`` in nanoseconds since the epoch."""
        return self.clock_ns + round(1e9 * instant)

    def keep(self, record: StepRecord) -> None:
        few = len(self.steps) < KEPT_STEPS
        if few or (record.is_sampled and len(self.steps) < MOST_STEPS):
            self.steps.append(record)
            record.requests.append(self.context)


class CallTracing:
    """Makes the spans of calls. ``sampling``: the sampler's description. ``content``: whether spans hold questions and
    answers."""

    def __init__(
        self, tracer: Tracer, step_tracer: Tracer, *, sampling: str, content: bool
    ) -> None:
        self._tracer, self._step_tracer, self._content = tracer, step_tracer, content
        self._propagator = propagate.get_global_textmap()
        self._fields = frozenset(self._propagator.fields)
        # OTEL_PROPAGATORS and OTEL_TRACES_SAMPLER can change both.
        self._follows_callers = _HEADER in self._fields and _FOLLOWING in sampling
        self._open: dict[str, list[CallTrace]] = {}
        self._device_free_at = 0.0
        self._model = ""
        self._image_positions = 0

    @property
    def num_open(self) -> int:
        """Number of sampled calls in progress."""
        return sum(len(traces) for traces in self._open.values())

    def ready(self, info: EngineInfo) -> None:
        self._model, self._image_positions = info.model, info.image_positions

    def begin(self, call: Call) -> None:
        """Decides whether the call is sampled, and sets its trace id."""
        carrier = {
            key: value
            for key, value in call.metadata
            if key in self._fields and isinstance(value, str)
        }
        if self._follows_callers and _HEADER in carrier:
            unsampled = _UNSAMPLED.fullmatch(carrier[_HEADER])
            if unsampled is not None:
                call.trace_id = unsampled[1]
                return
        parent = self._propagator.extract(carrier, _NO_PARENT) if carrier else _NO_PARENT
        span = self._tracer.start_span(
            call.method.removeprefix("/"), context=parent, kind=SpanKind.SERVER
        )
        context = span.get_span_context()
        call.trace_id = format_trace_id(context.trace_id)
        if span.is_recording():
            clock_ns = round(1e9 * (clock.wall() - clock.now()))
            call.trace = CallTrace(span, context, call.started_at, clock_ns)

    def on_message(self, call: Call) -> None:
        """Notes that the request's id is known now."""
        trace = call.trace
        if isinstance(trace, CallTrace):
            trace.request_id = call.request_id
            self._open[call.request_id] = [*self._open.get(call.request_id, ()), trace]

    def on_step(self, event: StepEvent) -> None:
        """Records the step for the sampled calls that it worked for. Runs on the step thread."""
        began_at = max(event.launched_at, self._device_free_at)
        self._device_free_at = event.collected_at
        if not self._open:
            return
        record = StepRecord(event, began_at)
        for request_id in {*event.request_ids, *event.encoded_request_ids}:
            for trace in self._open.get(request_id, ()):
                trace.keep(record)

    def span_of_request(self, event: RequestEvent) -> SpanContext | None:
        """The span of the sampled call that made the request, for exemplars of metrics; None if none did."""
        trace = self._trace_of(event)
        return None if trace is None else trace.context

    def span_of_step(self, event: StepEvent) -> SpanContext | None:
        """The span of a sampled call whose token came in the step, if all its tokens came after the same gap; None if
        no such call is known. Runs on the step thread."""
        gaps = event.token_gaps
        if not self._open or len(gaps) != 1 or event.num_prefill_positions:
            return None
        if event.num_tokens != gaps[0][1]:
            return None
        found = (self._open.get(request_id) for request_id in event.request_ids)
        return next((traces[-1].context for traces in found if traces), None)

    def on_request(self, event: RequestEvent, info: EngineInfo | None = None) -> None:
        """``info``: of the engine of a model that is not the default."""
        trace = self._trace_of(event)
        if trace is not None:
            trace.requests.append(event)
            trace.info = info

    def on_image(self, event: ImageEvent) -> None:
        trace = self._trace_of(event)
        if trace is not None:
            trace.images.append(event)

    def _trace_of(self, event: RequestEvent | ImageEvent) -> CallTrace | None:
        """The trace of the call that made the request. Of several calls with this id, it is the last that began before
        the request was accepted."""
        for trace in reversed(self._open.get(event.request_id, ())):
            if trace.begun_at <= event.accepted_at:
                return trace
        return None

    def end(self, call: Call) -> None:
        """Makes all spans of a sampled call."""
        trace, call.trace = call.trace, None
        if not isinstance(trace, CallTrace):
            return
        self._forget(trace)
        span, ended_at = trace.span, clock.now()
        span.set_attributes(attributes.of_call(call))
        if self._content:
            span.set_attributes(attributes.content(call))
        if call.code in attributes.SERVER_ERRORS:
            span.set_status(Status(StatusCode.ERROR, call.code.name))
        if call.error is not None:
            span.record_exception(call.error)
        if call.code in _EVENTS:
            span.add_event(_EVENTS[call.code], timestamp=trace.ns(ended_at))
        below = set_span_in_context(span, _NO_PARENT)
        for image in trace.images:
            self._image(trace, image, below)
        for event in trace.requests:
            self._request(trace, event, call, below)
        if trace.requests:
            last = max(event.finished_at for event in trace.requests)
            self._span(trace, names.POSTPROCESS, below, last, max(last, ended_at))
        span.end(trace.ns(ended_at))

    def _forget(self, trace: CallTrace) -> None:
        left = [other for other in self._open.get(trace.request_id, ()) if other is not trace]
        if left:
            self._open[trace.request_id] = left
        else:
            self._open.pop(trace.request_id, None)

    def _image(self, trace: CallTrace, event: ImageEvent, below: Context) -> None:
        span = self._tracer.start_span(
            names.IMAGE_PREPROCESS,
            context=below,
            attributes=attributes.of_image(event),
            start_time=trace.ns(event.accepted_at),
        )
        if event.error:
            span.set_status(Status(StatusCode.ERROR, event.error))
        span.end(trace.ns(event.ended_at))

    def _request(self, trace: CallTrace, event: RequestEvent, call: Call, below: Context) -> None:
        """Makes the spans of one request of the engine. A phase that did not begin has no span."""
        model, image_positions = self._model, self._image_positions
        if trace.info is not None:
            model, image_positions = trace.info.model, trace.info.image_positions
        span = self._tracer.start_span(
            f"{attributes.operation_of(event.skill)} {model}",
            context=below,
            attributes=attributes.of_request(
                event, call, model=model, image_positions=image_positions, streaming=call.streams
            ),
            start_time=trace.ns(event.accepted_at),
        )
        if event.error:
            span.set_status(Status(StatusCode.ERROR, event.error))
        inside = set_span_in_context(span, _NO_PARENT)
        queued_at = event.accepted_at
        if event.prepared_at is not None:
            work = {names.PREPROCESS_SECONDS: event.metrics.preprocess_time_ms / 1e3}
            queued_at = event.prepared_at
            self._span(
                trace, names.IMAGE_PREPROCESS, inside, event.accepted_at, queued_at, extra=work
            )
        scheduled_at, finished_at = event.scheduled_at, event.finished_at
        queue_end = finished_at if scheduled_at is None else scheduled_at
        self._span(trace, names.QUEUE, inside, queued_at, queue_end)
        if scheduled_at is not None:
            self._computation(trace, event, scheduled_at, inside)
        span.end(trace.ns(finished_at))

    def _computation(
        self, trace: CallTrace, event: RequestEvent, scheduled_at: float, inside: Context
    ) -> None:
        """Makes the spans of vision, prefill and decode from the steps that worked for the request."""
        first_at = event.first_token_at or event.finished_at
        steps = [s for s in trace.steps if s.event.collected_at >= scheduled_at]
        early = list(itertools.takewhile(lambda s: s.event.collected_at <= first_at, steps))
        encoding = [s for s in early if event.request_id in s.event.encoded_request_ids]
        prefill_at = scheduled_at
        if encoding and not self._image_was_cached(event):
            # The encoding may have begun earlier, for another request with the same image.
            began_at = max(scheduled_at, encoding[0].began_at)
            prefill_at = max(scheduled_at, encoding[-1].vision_end)
            self._span(trace, names.VISION, inside, began_at, prefill_at, steps=encoding)
        if not attributes.generates(event.skill):
            return
        filling = [s for s in early if event.request_id in s.event.request_ids]
        self._span(trace, names.PREFILL, inside, prefill_at, first_at, steps=filling)
        if event.first_token_at is not None:
            sampled = [s for s in steps[len(early) :] if s.is_sampled]
            self._span(trace, names.DECODE, inside, first_at, event.finished_at, steps=sampled)

    def _image_was_cached(self, event: RequestEvent) -> bool:
        return event.metrics.cached_tokens > self._image_positions

    def _span(
        self,
        trace: CallTrace,
        name: str,
        parent: Context,
        began_at: float,
        ended_at: float,
        *,
        steps: list[StepRecord] | None = None,
        extra: dict[str, float] | None = None,
    ) -> None:
        links = [Link(self._step(each, trace)) for each in (steps or ())[:LINKED_STEPS]]
        span = self._tracer.start_span(
            name, context=parent, attributes=extra, links=links, start_time=trace.ns(began_at)
        )
        span.end(trace.ns(max(began_at, ended_at)))

    def _step(self, record: StepRecord, trace: CallTrace) -> SpanContext:
        """The span of a step, which is not sampled again, because its requests are sampled."""
        if record.context is None:
            span = self._step_tracer.start_span(
                names.STEP,
                context=Context(),
                attributes=attributes.of_step(record.event),
                links=[Link(context) for context in record.requests],
                start_time=trace.ns(record.began_at),
            )
            span.end(trace.ns(record.event.collected_at))
            record.context = span.get_span_context()
        return record.context
