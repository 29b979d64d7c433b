"""DeliveryThread: from sampled tokens to updates, beside the step thread.

Owns the skill outputs (text, points, paths) and how often streams get updates. The step thread puts one batch a step
into its queue and goes on. The results go to ``deliver``, one call for all streams.

The event loop pays for every update, not for its length: a gRPC message takes some 50 us of the interpreter that the
step thread needs too. So the next call waits a while for every stream that the last one woke: 64 streams get two or
three steps at once, a few streams get each step at once. A request's admission, first token and end never wait.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import clock
from ..errors import KestrelError, RuntimeFailure
from ..skills.base import SkillOutput
from ..skills.objects.outline import OutlineOutput
from ..types.events import FinishReason, StreamUpdate, TokenLogprob
from ..types.step import RefineRow, StepToken
from ..types.timings import StepTimings
from .refining import Refining

if TYPE_CHECKING:
    from ..types.requests import PreparedImage

logger = logging.getLogger(__name__)

PAUSE_PER_STREAM_S = 150e-6
"""Three times what a message costs, so that messages take at most a third of the interpreter."""

LONGEST_PAUSE_S = 0.010
"""No update waits longer than this."""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """Why and when the step thread ended a sequence. ``stop``: the stop token that ended it, if one did."""

    reason: FinishReason | KestrelError
    timings: StepTimings
    reading: object | None = None
    """What the device read of the request's image, or its refined mask, as in StepResult."""
    stop: StepToken | None = None


@dataclass(slots=True)
class StepReport:
    """What one step did for one request: admitted it, sampled a token, ended it. Never changed; not frozen because one
    is made for every token, and that would double its cost."""

    sequence_id: int
    output: SkillOutput
    num_sampled: int
    token: StepToken | None = None
    end: SequenceEnd | None = None
    admitted_at: float | None = None
    to_refine: PreparedImage | None = None
    """The image of a request that has its last token and may be refined: the step thread waits for ``refine``."""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of a request that ended well or was cancelled; ``output`` holds what was generated."""

    output: dict[str, Any]
    reason: FinishReason
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    absence: float | None = None
    reasoning_tokens: int = 0
    """Those of ``token_ids`` that were reasoning."""
    abstained: bool = False
    """As in EngineResult."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request's outcome and when the step thread worked on it."""

    outcome: RequestOutcome | KestrelError
    timings: StepTimings


@dataclass(slots=True)
class Delivery:
    """News of one request for the event loop. ``end`` is set exactly once in a request's life, in its last delivery.

    ``updates``: each with the number of tokens generated when it was made. ``admitted_at``: when the scheduler first
    took the request into the batch, if it did so since the last delivery.
    """

    sequence_id: int
    updates: list[tuple[int, StreamUpdate]] = field(default_factory=list)
    admitted_at: float | None = None
    end: RequestEnd | None = None


Deliver = Callable[[list[Delivery]], None]


class DeliveryThread:
    """Calls ``abort`` with the id of a sequence that must end, because its output is complete or its skill raised.

    The sequence's further tokens are dropped. Its outcome, when its end is reported, is the complete output with
    the reason "stop", or RuntimeFailure. Steps that were out when the output became complete don't change the outcome,
    even if one of them fails.
    """

    def __init__(
        self,
        deliver: Deliver,
        abort: Callable[[int], None],
        refine: Callable[[int, RefineRow | None], None] | None = None,
        refining: Refining | None = None,
    ) -> None:
        """``refine``: called once for each report with ``to_refine``, with the work for the device, or None if there is
        none. With it comes ``refining``."""
        self._deliver, self._abort = deliver, abort
        self._refine, self._refining = refine, refining
        # Bounded by what is sampled: at most max_tokens entries a request that the engine admitted.
        self._batches: queue.SimpleQueue[list[StepReport] | None] = queue.SimpleQueue()
        self._over: set[int] = set()
        """Sequences for which ``abort`` was called and whose end was not reported yet."""
        self._pending: dict[int, Delivery] = {}
        self._due = 0.0
        """When what is pending is delivered."""
        self.thread = threading.Thread(target=self._run, name="kestrel-delivery", daemon=True)
        """The thread that delivers. Only this object starts it."""

    def start(self) -> None:
        self.thread.start()

    @property
    def next_at(self) -> float | None:
        """The instant from which a turn does not wait; None while there is nothing to deliver."""
        if not self._batches.empty():
            return 0.0
        return self._due if self._pending else None

    def put(self, batch: list[StepReport]) -> None:
        """Any thread; never waits."""
        self._batches.put(batch)

    def stop(self) -> None:
        """Waits until everything put before has been delivered."""
        self._batches.put(None)
        if self.thread.is_alive():
            self.thread.join()

    def _run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """This object's thread, until it returns False. Waits for reports or for the end of the pause, and delivers
        what must not wait longer."""
        pending = self._pending
        try:
            timeout = max(0.0, self._due - clock.now()) if pending else None
            batch = clock.get(self._batches, timeout)
        except queue.Empty:
            batch = []
        urgent: dict[int, None] = {}
        for report in batch or ():
            if self._advance(report, pending):
                urgent[report.sequence_id] = None
        now = clock.now()
        if pending and (now >= self._due or batch is None):
            self._due = now + min(LONGEST_PAUSE_S, PAUSE_PER_STREAM_S * len(pending))
            self._deliver(list(pending.values()))
            pending.clear()
        elif urgent:
            self._deliver([pending.pop(sequence_id) for sequence_id in urgent])
        return batch is not None

    def _advance(self, report: StepReport, pending: dict[int, Delivery]) -> bool:
        """Adds the updates that ``report`` gives to its stream's pending delivery. True: the delivery must not wait."""
        sequence_id = report.sequence_id
        updates: list[StreamUpdate] = []
        end: RequestEnd | None = None
        try:
            if sequence_id in self._over:
                if report.end is None:
                    return False
                self._over.discard(sequence_id)
                if report.output.is_complete:
                    end, updates = self._finish(report.output, report.end)
                else:
                    end = RequestEnd(_skill_failure(), report.end.timings)
            else:
                if report.token is not None:
                    updates = report.output.push(report.token)
                if report.to_refine is not None:
                    updates = [*updates, *self._draft(report, report.to_refine)]
                elif report.end is not None:
                    self._use_reading(report, report.end)
                    end, last_updates = self._finish(report.output, report.end)
                    updates = [*updates, *last_updates]
                elif report.output.is_complete:
                    self._end_early(sequence_id)
        except Exception:  # A skill's fault ends its own request only.
            logger.exception("the skill of sequence %d failed on a token", sequence_id)
            if report.end is None:
                self._end_early(sequence_id)
            else:
                end = RequestEnd(_skill_failure(), report.end.timings)
        if not updates and end is None and report.admitted_at is None:
            return False
        delivery = pending.get(sequence_id)
        if delivery is None:
            delivery = pending[sequence_id] = Delivery(sequence_id)
        for update in updates:
            delivery.updates.append((report.num_sampled, update))
        if report.admitted_at is not None:
            delivery.admitted_at = report.admitted_at
        delivery.end = end
        return end is not None or report.num_sampled <= 1

    def _draft(self, report: StepReport, image: PreparedImage) -> list[StreamUpdate]:
        """Ends an output for now, and passes its outline to the step thread."""
        assert self._refine is not None and self._refining is not None
        updates = report.output.finish()
        self._refine(
            report.sequence_id, self._refining.begin(report.sequence_id, report.output, image)
        )
        return updates

    def _use_reading(self, report: StepReport, end: SequenceEnd) -> None:
        if self._refining is not None and isinstance(report.output, OutlineOutput):
            self._refining.finish(report.sequence_id, report.output, end.reading)
        elif end.reading is not None:
            report.output.take(end.reading)

    def _end_early(self, sequence_id: int) -> None:
        self._over.add(sequence_id)
        self._abort(sequence_id)

    @staticmethod
    def _finish(output: SkillOutput, end: SequenceEnd) -> tuple[RequestEnd, list[StreamUpdate]]:
        reason = end.reason
        if isinstance(reason, KestrelError) and not output.is_complete:
            return RequestEnd(reason, end.timings), []
        if end.stop is not None:
            output.note_stop(end.stop)
        updates = output.finish()
        # Asked again: a stop string may lie in the text that was held back to the end.
        if output.is_complete:
            reason = "stop"
        assert not isinstance(reason, KestrelError)
        finished = RequestOutcome(
            output.output(),
            reason,
            output.token_ids,
            output.logprobs,
            output.absence,
            output.num_reasoning_tokens,
        )
        return RequestEnd(finished, end.timings), updates


def _skill_failure() -> RuntimeFailure:
    return RuntimeFailure("the skill failed on a sampled token")
