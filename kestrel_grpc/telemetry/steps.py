"""Which steps the sampled calls took part in. Written by the step thread, read by the event loop.

A step serves many requests, so it can't be a child of any: it gets a trace of its own, and the requests' spans link to
it. Its span is made when the first request that links to it ends. Not every step gets one: steps that began something
for a sampled request do, decode steps one in DECODE_SAMPLING.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer

from kestrel_engine import StepEvent

from . import attributes, names

DECODE_SAMPLING = 100
"""One step in so many is kept once a request has KEPT_STEPS."""
KEPT_STEPS = 16
LINKED_STEPS = 8
MOST_STEPS = 64
"""Steps kept of one call at most."""


@dataclass(slots=True, eq=False)
class StepRecord:
    """``began_at``: when the device took it up; it runs steps in the order of their launch."""

    event: StepEvent
    began_at: float
    requests: list[SpanContext] = field(default_factory=list)
    """Sampled requests with a part in it."""
    context: SpanContext | None = None
    """Its span's, once there is one."""

    @property
    def vision_end(self) -> float:
        return min(self.began_at + self.event.vision_s, self.event.collected_at)

    @property
    def is_sampled(self) -> bool:
        return self.event.step_id % DECODE_SAMPLING == 0


class StepSpans:
    """Makes steps' spans, whatever the sampler says of new traces: their requests are sampled."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def links(self, records: list[StepRecord], clock_ns: int) -> list[Link]:
        """Links to the first LINKED_STEPS of ``records``. ``clock_ns``: the epoch's nanoseconds less the monotonic
        clock's."""
        return [Link(self._context(record, clock_ns)) for record in records[:LINKED_STEPS]]

    def _context(self, record: StepRecord, clock_ns: int) -> SpanContext:
        if record.context is None:
            span = self._tracer.start_span(
                names.STEP,
                context=Context(),
                attributes=attributes.of_step(record.event),
                links=[Link(context) for context in record.requests],
                start_time=clock_ns + round(1e9 * record.began_at),
            )
            span.end(clock_ns + round(1e9 * record.event.collected_at))
            record.context = span.get_span_context()
        return record.context
