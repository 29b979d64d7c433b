"""CallTracing: one trace a call, built from timestamps after the fact.

The server's span begins with the call, so that its ids are known; all below it is made when the call has ended, from
what the engine told: nothing is built for a call that isn't sampled, and nothing while one is computed. Runs on the
event loop, but for ``on_step``.

    kestrel.v1.VisionService/Query                 SERVER, child of the caller's traceparent
    ├─ generate_content MODEL                      one a request of the engine; Analyze makes several
    │  ├─ image.preprocess
    │  ├─ queue
    │  ├─ vision.encode                            links to the steps that encoded
    │  ├─ prefill                                  links to its steps
    │  └─ decode                                   links to one step in a hundred
    ├─ image.preprocess                            of Analyze and ImageService, which prepare a picture by itself
    └─ postprocess                                 last token to last message
"""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer, format_trace_id
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from kestrel_engine import EngineInfo, ImageEvent, RequestEvent, StepEvent

from ..edge.call import Call
from . import attributes, names
from .steps import KEPT_STEPS, MOST_STEPS, StepRecord, StepSpans

_NO_PARENT = Context()
_HEADER = "traceparent"
_UNSAMPLED = re.compile(
    "00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]", re.ASCII
)
"""A caller whose trace isn't recorded: most are, so they are recognised without building anything."""
_FOLLOWING = "remoteParentNotSampled:AlwaysOffSampler"
"""In the description of a sampler that samples nothing for such a caller."""
_EVENTS = {
    grpc.StatusCode.CANCELLED: names.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: names.DEADLINE_EXCEEDED,
}


@dataclass(slots=True, eq=False)
class CallTrace:
    """A sampled call while it runs."""

    span: Span
    context: SpanContext
    begun_at: float
    """Seconds of the monotonic clock, as all instants."""
    clock_ns: int
    """The epoch's nanoseconds less the monotonic clock's."""
    message: Any = None
    request_id: str = ""
    requests: list[RequestEvent] = field(default_factory=list)
    images: list[ImageEvent] = field(default_factory=list)
    """Pictures that were prepared ahead of requests."""
    steps: list[StepRecord] = field(default_factory=list)

    def ns(self, instant: float) -> int:
        """Nanoseconds of the epoch."""
        return self.clock_ns + round(1e9 * instant)

    def keep(self, record: StepRecord) -> None:
        few = len(self.steps) < KEPT_STEPS
        if few or (record.is_sampled and len(self.steps) < MOST_STEPS):
            self.steps.append(record)
            record.requests.append(self.context)


class CallTracing:
    """``sampling``: the sampler's description. ``content``: whether questions and answers go into spans."""

    def __init__(
        self, tracer: Tracer, step_tracer: Tracer, *, sampling: str, content: bool
    ) -> None:
        self._tracer = tracer
        self._step_spans = StepSpans(step_tracer)
        self._content = content
        self._propagator = propagate.get_global_textmap()
        self._fields = frozenset(self._propagator.fields)
        # OTEL_PROPAGATORS and OTEL_TRACES_SAMPLER may say otherwise.
        self._follows_callers = _HEADER in self._fields and _FOLLOWING in sampling
        self._open: dict[str, list[CallTrace]] = {}
        self._device_free_at = 0.0
        self._model = ""
        self._image_positions = 0

    @property
    def num_open(self) -> int:
        """Sampled calls that have not ended."""
        return sum(len(traces) for traces in self._open.values())

    def ready(self, info: EngineInfo) -> None:
        self._model, self._image_positions = info.model, info.image_positions

    def begin(self, call: Call) -> None:
        """Decides whether the call is sampled, and gives it its trace id."""
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
            clock_ns = time.time_ns() - time.monotonic_ns()
            call.trace = CallTrace(span, context, call.started_at, clock_ns)

    def take(self, call: Call, message: Any) -> None:
        """The call's request has been read and its id is known."""
        trace = call.trace
        if isinstance(trace, CallTrace):
            trace.message, trace.request_id = message, call.request_id
            self._open[call.request_id] = [*self._open.get(call.request_id, ()), trace]

    def on_step(self, event: StepEvent) -> None:
        """On the step thread: notes the step for the sampled calls that it worked for."""
        began_at = max(event.launched_at, self._device_free_at)
        self._device_free_at = event.collected_at
        if not self._open:
            return
        record = StepRecord(event, began_at)
        for request_id in {*event.request_ids, *event.encoded_request_ids}:
            for trace in self._open.get(request_id, ()):
                trace.keep(record)

    def on_request(self, event: RequestEvent) -> None:
        trace = self._trace_of(event)
        if trace is not None:
            trace.requests.append(event)

    def on_image(self, event: ImageEvent) -> None:
        trace = self._trace_of(event)
        if trace is not None:
            trace.images.append(event)

    def _trace_of(self, event: RequestEvent | ImageEvent) -> CallTrace | None:
        """Of the call that made it; of calls with the same id it is the last that began before."""
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
        span, ended_at = trace.span, time.monotonic()
        span.set_attributes(attributes.of_call(call))
        if self._content:
            span.set_attributes(attributes.content(call, trace.message))
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
        """The spans of one request of the engine; a phase that never began has none."""
        span = self._tracer.start_span(
            f"{names.GENERATE} {self._model}",
            context=below,
            attributes=attributes.of_request(
                event,
                trace.message,
                model=self._model,
                image_positions=self._image_positions,
                streaming="/Stream" in call.method,
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
        """Vision, prefill and decode, from the steps that worked for the request."""
        first_at = event.first_token_at or event.finished_at
        steps = [s for s in trace.steps if s.event.collected_at >= scheduled_at]
        early = list(itertools.takewhile(lambda s: s.event.collected_at <= first_at, steps))
        encoding = [s for s in early if event.request_id in s.event.encoded_request_ids]
        prefill_at = scheduled_at
        if encoding and not self._picture_was_cached(event):
            # It may have begun for another request with the same picture.
            began_at = max(scheduled_at, encoding[0].began_at)
            prefill_at = max(scheduled_at, encoding[-1].vision_end)
            self._span(trace, names.VISION, inside, began_at, prefill_at, steps=encoding)
        filling = [s for s in early if event.request_id in s.event.request_ids]
        self._span(trace, names.PREFILL, inside, prefill_at, first_at, steps=filling)
        if event.first_token_at is not None:
            sampled = [s for s in steps[len(early) :] if s.is_sampled]
            self._span(trace, names.DECODE, inside, first_at, event.finished_at, steps=sampled)

    def _picture_was_cached(self, event: RequestEvent) -> bool:
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
        links = self._step_spans.links(steps, trace.clock_ns) if steps else None
        span = self._tracer.start_span(
            name, context=parent, attributes=extra, links=links, start_time=trace.ns(began_at)
        )
        span.end(trace.ns(max(began_at, ended_at)))
