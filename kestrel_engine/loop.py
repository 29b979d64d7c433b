"""EngineLoop: schedule, run, commit, in one thread.

Owns the scheduler, the skill states and the runtime; nobody else touches them. Meets the event loop at two queues:
commands come in through ``submit`` and ``abort``, deliveries go out through one callback a step. Knows no asyncio.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import EngineClosed, KestrelError, RequestCancelled, RuntimeFailure
from .events import FinishReason, StreamUpdate
from .runtime.protocol import Runtime
from .scheduler.scheduler import Scheduler, StepBudget
from .scheduler.sequence import Sequence
from .skills.base import Advance, SkillState
from .step import StepPlan, StepToken
from .timings import RequestTimings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A request that is ready to compute."""

    sequence: Sequence
    state: SkillState
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended well."""

    output: dict[str, Any]
    reason: FinishReason
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Delivery:
    """What one step did for one request; ``outcome`` is set exactly once in a request's life."""

    sequence_id: int
    updates: list[StreamUpdate] = field(default_factory=list)
    token_index: int = 0
    outcome: Finished | KestrelError | None = None


Deliver = Callable[[list[Delivery]], None]


class EngineLoop:
    """A thread that steps while there is work and sleeps while there is none."""

    def __init__(
        self,
        runtime: Runtime,
        deliver: Deliver,
        *,
        budget: StepBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._deliver = deliver
        self._clock = clock
        self._scheduler = Scheduler(runtime.limits, budget)
        self._active: dict[int, Work] = {}
        # Unbounded here because the engine admits a bounded number of requests, each of which sends two commands.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[Delivery] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kestrel-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, work: Work) -> None:
        """Any thread. The request's outcome comes as a Delivery."""
        self._commands.put(lambda: self._add(work))

    def abort(self, sequence_id: int) -> None:
        """Any thread. Ends a request before the next step; without effect if it has ended."""
        self._commands.put(lambda: self._abort(sequence_id))

    def stop(self) -> None:
        """Any thread but the loop's. Fails what is unfinished with EngineClosed, closes the runtime, joins."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
                self._flush()
        except BaseException as error:  # The loop's edge: nobody may wait for a dead thread.
            logger.exception("the step loop died")
            self._fail_all(RuntimeFailure(f"the engine failed: {type(error).__name__}"))
        else:
            self._fail_all(EngineClosed("the engine was shut down"))
        finally:
            self._flush()
            self._runtime.close()

    def _take_commands(self) -> bool:
        """Runs what was asked for; waits if there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._flush()

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            return
        now = self._clock()
        for row in plan.prefill:
            self._active[row.sequence_id].timings.scheduled_at = now
        try:
            result = self._runtime.collect(self._runtime.launch(plan))
        except Exception:  # The loop's edge: a failed step ends its requests, not the engine.
            logger.exception("step %d failed", plan.step_id)
            self._fail_step(plan)
            return
        for sequence, token in self._scheduler.commit(plan, result):
            self._consume(sequence, token)

    def _consume(self, sequence: Sequence, token: StepToken) -> None:
        work = self._active[sequence.sequence_id]
        now = self._clock()
        if work.timings.first_token_at is None:
            work.timings.first_token_at = now
        work.timings.last_token_at = now
        try:
            advance = self._advance(work, token)
            self._outbox.append(
                Delivery(sequence.sequence_id, advance.updates, token_index=sequence.num_sampled)
            )
            if advance.finish is None:
                self._scheduler.resume(sequence.sequence_id, work.state.rule())
                return
            outcome = Finished(work.state.output(), advance.finish, work.state.token_ids)
        except Exception:  # A skill's fault ends its own request only.
            logger.exception("the skill of sequence %d failed", sequence.sequence_id)
            self._end(sequence.sequence_id, RuntimeFailure("the skill failed on a sampled token"))
            return
        self._end(sequence.sequence_id, outcome)

    @staticmethod
    def _advance(work: Work, token: StepToken) -> Advance:
        advance = work.state.consume(token)
        if advance.finish is None and work.sequence.num_sampled == work.sequence.max_tokens:
            limit = work.state.stop_at_limit()
            return Advance(advance.updates + limit.updates, limit.finish)
        return advance

    def _add(self, work: Work) -> None:
        self._active[work.sequence.sequence_id] = work
        self._scheduler.add(work.sequence)

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self._active:
            self._end(sequence_id, RequestCancelled("the request was cancelled"))

    def _fail_step(self, plan: StepPlan) -> None:
        for sequence_id in self._scheduler.fail_step(plan):
            self._end(sequence_id, RuntimeFailure("the step that computed this request failed"))

    def _fail_all(self, error: KestrelError) -> None:
        while True:  # Requests that were submitted but never seen must hear of it too.
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command()
        for sequence_id in list(self._active):
            self._end(sequence_id, error)

    def _end(self, sequence_id: int, outcome: Finished | KestrelError) -> None:
        work = self._active.pop(sequence_id)
        self._scheduler.abort(sequence_id)
        work.timings.finished_at = self._clock()
        self._outbox.append(
            Delivery(sequence_id, token_index=work.sequence.num_sampled, outcome=outcome)
        )

    def _flush(self) -> None:
        if self._outbox:
            deliveries, self._outbox = self._outbox, []
            self._deliver(deliveries)
