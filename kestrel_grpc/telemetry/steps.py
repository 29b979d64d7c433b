"""The steps of sampled calls. The step thread records them; the event loop makes their spans.

A step serves many requests, so its span is not a child of theirs. The span has its own trace, and the spans of the
requests link to it. It is made when the first request that links to it ends. Only some steps get a span: the first
KEPT_STEPS of a sampled call, and then one step in DECODE_SAMPLING.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer

from kestrel_engine import StepEvent

from . import attributes, names

DECODE_SAMPLING = 100
"""After KEPT_STEPS steps of a call, one step in this many is recorded."""
KEPT_STEPS = 16
LINKED_STEPS = 8
MOST_STEPS = 64
"""Limit on the recorded steps of one call."""


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


class StepSpans:
    """Makes the spans of steps. They are not sampled again, because their requests are sampled."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def links(self, records: list[StepRecord], clock_ns: int) -> list[Link]:
        """Links to the first LINKED_STEPS of ``records``. ``clock_ns``: nanoseconds since the epoch minus nanoseconds
        of the monotonic clock."""
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
