"""EngineLoop: schedule, launch, collect, commit, in one thread.

Owns the scheduler, the sequences, the skill controls and the runtime; no other thread uses them. Up to ``depth`` steps
are out at a time: step N + 1 is launched before step N is read, with the rules that are known ahead, and rows of
sequences that turn out to have ended are dropped. With two lanes (types.step.Lane), ``depth`` is that of the decode
lane. Commands come in through one queue, reports go out to the delivery thread, and ``stats`` is an immutable snapshot.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import (
    DeadlineExceeded,
    EngineClosed,
    KestrelError,
    QueueTimeout,
    RequestError,
    RuntimeFailure,
    SkillFault,
)
from ..runtime.profile import StepProfile
from ..runtime.protocol import Runtime, StepHandle
from ..scheduler.policy import SchedulerPolicy
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import Sequence
from ..skills.base import SkillControl, SkillOutput
from ..skills.rule_check import RuleCheck
from ..types.embedding import Embedding
from ..types.events import FinishReason
from ..types.info import SchedulerStats
from ..types.observer import Observer, StepEvent
from ..types.requests import num_positions
from ..types.step import PREVIOUS, Lane, RefineRow, StepPlan, StepResult, StepToken
from ..types.submission import Submission
from ..types.timings import StepTimings
from .delivery import DeliveryThread, SequenceEnd, StepReport

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

EXIT_PATIENCE_S = 5.0
"""Seconds that a program without a call of shutdown() waits at its end for the running step."""

PIPELINE_DEPTH = 2
"""The default for steps out at a time: one runs while the host works on the other."""
NEW_WORK_DEPTH = 2
"""Steps out in the lane of new work: one runs, and the next one is there when it ends."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request that is ready for the scheduler."""

    request_id: str
    submission: Submission
    control: SkillControl
    output: SkillOutput
    queue_limited: bool = False
    """The submission's deadline is the engine's bound on waiting, not the caller's."""
    refines: bool = False
    """After the last token, the delivery thread may ask for a refinement of the request's outline."""


@dataclass(slots=True, eq=False)
class _Active:
    """A request that has not ended, on the step thread."""

    work: Work
    sequence: Sequence | None = None
    """None until the scheduler has it."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish: FinishReason | None = None
    """Why generation ended, while the outline is refined. The scheduler no longer has the sequence."""

    @property
    def num_sampled(self) -> int:
        return 0 if self.sequence is None else self.sequence.num_sampled

    def timings(self, finished_at: float) -> StepTimings:
        sequence = self.sequence
        return StepTimings(
            scheduled_at=None if sequence is None else sequence.admitted_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            finished_at=finished_at,
            cached_tokens=0 if sequence is None else sequence.num_cached,
            encoded_crops=0 if sequence is None else sequence.num_encoded_crops,
            reused_crops=0 if sequence is None else sequence.num_reused_crops,
        )


@dataclass(frozen=True, slots=True)
class _Out:
    plan: StepPlan
    handle: StepHandle | None
    launched_at: float


class EngineLoop:
    """A thread that steps while there is work and sleeps while there is none."""

    def __init__(
        self,
        runtime: Runtime,
        delivery: DeliveryThread,
        *,
        policy: SchedulerPolicy | None = None,
        observer: Observer | None = None,
        depth: int = PIPELINE_DEPTH,
        clock: Callable[[], float] = time.monotonic,
        check_rule: RuleCheck | None = None,
    ) -> None:
        """``check_rule``: None trusts all skills."""
        self._runtime = runtime
        self._delivery = delivery
        self._observer = observer
        two = runtime.limits.decodes_beside
        self._depths = (
            {Lane.NEW_WORK: NEW_WORK_DEPTH, Lane.DECODE: depth} if two else {Lane.ALL: depth}
        )
        self._clock = clock
        self._check_rule = check_rule
        self._scheduler = Scheduler(runtime.limits, policy)
        self._stats = self._scheduler.stats
        self._active: dict[int, _Active] = {}
        # Unbounded here because the engine admits a bounded number of requests, each of which sends two commands.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._out: dict[Lane, deque[_Out]] = {lane: deque() for lane in self._depths}
        """The steps that are out, in the order of their launch."""
        self._outbox: list[StepReport] = []
        self._profile: StepProfile | None = None
        self._is_refining = False
        """Whether masks are queued, or out in a step."""
        self._beat_at = clock()
        self._thread = threading.Thread(target=self._run, name="kestrel-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # An interpreter that ends while a thread is inside torch aborts the whole process.
        atexit.register(self.stop, EXIT_PATIENCE_S)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stats(self) -> SchedulerStats:
        """Any thread. The counts after the last command or step."""
        return self._stats

    @property
    def stalled_s(self) -> float:
        """Any thread. Seconds since the last command or collected step, while there is work; else 0."""
        stats = self._stats
        has_work = stats.running or stats.waiting or self._is_refining
        return self._clock() - self._beat_at if has_work else 0.0

    def submit(self, work: Work) -> None:
        """Any thread. The delivery thread reports the request's outcome."""
        self._commands.put(lambda: self._add(work))

    def abort(self, sequence_id: int) -> None:
        """Any thread. Ends a request as "cancelled" before the next step; without effect if it has ended."""
        self._commands.put(lambda: self._abort(sequence_id))

    def refuse(self, sequence_id: int, error: KestrelError) -> None:
        """Any thread. Ends a request with ``error`` before the next step; without effect if it has ended."""
        self._commands.put(lambda: self._refuse(sequence_id, error))

    def refine(self, sequence_id: int, row: RefineRow | None) -> None:
        """Any thread. Continues a request whose report had ``to_refine``: refines the mask of ``row`` in one of the
        next steps, or, without a row, ends the request. Without effect if the request has ended."""
        self._commands.put(lambda: self._refine(sequence_id, row))

    def flush(self) -> Future[None]:
        """Any thread. Drops cached prefixes and embeddings without users, before the next step. The future ends then,
        or never if the thread has ended or hangs."""
        flushed: Future[None] = Future()

        def flush() -> None:
            self._scheduler.flush()
            self._stats = self._scheduler.stats
            flushed.set_result(None)

        self._commands.put(flush)
        return flushed

    def begin_profile(self, profile: StepProfile) -> None:
        """Any thread. Records steps until it has enough, or ``end_profile``. One at a time."""
        self._commands.put(lambda: self._begin_profile(profile))

    def end_profile(self) -> None:
        """Any thread. Without effect if none runs."""
        self._commands.put(self._end_profile)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Any thread but the loop's. Fails unfinished requests with EngineClosed and closes the runtime. False: the
        thread hangs."""
        atexit.unregister(self.stop)
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._advance()
                self._flush()
        except BaseException as error:  # The loop's edge: no caller may wait for a dead thread.
            logger.exception("the step loop died")
            self._fail_all(RuntimeFailure(f"the engine failed: {type(error).__name__}"))
        else:
            self._fail_all(EngineClosed("the engine was shut down"))
        finally:
            self._end_profile()
            self._flush()
            self._runtime.close()

    def _take_commands(self) -> bool:
        """Runs the commands in the queue; waits for one if there is no other work. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.has_work)
            except queue.Empty:
                return True
            self._beat_at = self._clock()
            if command is None:
                return False
            command()
            self._flush()

    def _advance(self) -> None:
        """Launches a step if the pipeline has room, then collects the oldest if the pipeline is full or stuck."""
        now = self._clock()
        for sequence_id in self._scheduler.expired(now):
            self._expire(self._active[sequence_id].work)
        plan = self._schedule(now)
        for sequence in self._scheduler.take_admitted():
            output = self._active[sequence.sequence_id].work.output
            admitted_at = sequence.admitted_at
            self._outbox.append(
                StepReport(sequence.sequence_id, output, 0, admitted_at=admitted_at)
            )
        if plan is not None:
            self._launch(plan, now)
        if plan is None:
            generating = (a for a in self._active.values() if a.finish is None)
            assert any(self._out.values()) or next(generating, None) is None, (
                "there is work, but no step to be made of it"
            )
        if any(self._out.values()) and (plan is None or not self._has_room):
            self._collect()

    def _schedule(self, now: float) -> StepPlan | None:
        """The next step of a lane that has room. New work first: it waits for the decode steps launched before it."""
        for lane, depth in self._depths.items():
            if len(self._out[lane]) < depth:
                plan = self._scheduler.schedule(now, lane)
                if plan is not None:
                    return plan
        return None

    @property
    def _has_room(self) -> bool:
        return any(len(self._out[lane]) < depth for lane, depth in self._depths.items())

    def _launch(self, plan: StepPlan, now: float) -> None:
        try:
            handle = self._runtime.launch(plan)
        except Exception as error:
            # The loop's edge, as in _collect; steps fail in order, so those before it come first.
            while any(self._out.values()):
                self._collect()
            logger.exception("step %d could not be launched", plan.step_id)
            self._fail_step(_Out(plan, None, now), error)
            return
        self._out[plan.lane].append(_Out(plan, handle, now))
        for row in plan.prefill + plan.decode:
            if row.sample is not None:
                try:
                    active = self._active[row.sequence_id]
                    assert active.sequence is not None
                    self._resume(active, active.sequence)
                except Exception as error:
                    self._skill_failed(row.sequence_id, error)

    def _resume(self, active: _Active, sequence: Sequence) -> None:
        """Gives the scheduler the next rule as soon as it is known."""
        work = active.work
        if sequence.rule is None and sequence.num_planned < work.submission.max_tokens:
            rule = work.control.rule(sequence.num_planned)
            if rule is not None:
                check = self._check_rule
                # Looked up here: this runs for every token of every row.
                if check is not None and check.passed.get(id(rule)) is not rule:
                    check(rule)
                self._scheduler.resume(sequence.sequence_id, rule)

    def _lane_to_collect(self) -> Lane:
        """The lane whose oldest step is read next. Decode steps are short, so waiting for one delays the other lane
        little."""
        heads = {lane: out[0] for lane, out in self._out.items() if out}
        decode, new_work = heads.get(Lane.DECODE), heads.get(Lane.NEW_WORK)
        if decode is None or new_work is None:
            return next(iter(heads))
        after = decode.plan.after
        if after is not None and after >= new_work.plan.step_id:
            return Lane.NEW_WORK
        assert new_work.handle is not None
        return Lane.NEW_WORK if self._runtime.is_done(new_work.handle) else Lane.DECODE

    def _collect(self) -> None:
        out = self._out[self._lane_to_collect()].popleft()
        try:
            assert out.handle is not None
            result = self._runtime.collect(out.handle)
        except (
            Exception
        ) as error:  # The loop's edge: a failed step ends its requests, not the engine.
            logger.exception("step %d failed", out.plan.step_id)
            self._fail_step(out, error)
            return
        self._beat_at = self._clock()
        if self._profile is not None:
            self._profile.step()
            if self._profile.ended.done():
                self._profile = None
        self._observe(out, result, failed=False)
        for sequence_id in result.non_finite & self._active.keys():
            self._not_finite(sequence_id)
        for sequence, token in self._scheduler.commit(out.plan, result):
            self._consume(self._active[sequence.sequence_id], sequence, token)
        for sequence_id in result.embeddings.keys() & self._active.keys():
            active = self._active[sequence_id]
            active.first_token_at = active.last_token_at = self._beat_at
            self._end(sequence_id, "stop", embedding=result.embeddings[sequence_id])
        if out.plan.refine:
            self._end_refined(out.plan, result)

    def _fail_step(self, out: _Out, error: Exception) -> None:
        self._observe(out, StepResult(), failed=True)
        memory = isinstance(error, MemoryError)
        why = ": the device is out of memory" if memory else ""
        for sequence_id in self._scheduler.fail_step(out.plan):
            failure = RuntimeFailure(
                f"the step that computed this request failed{why}", out_of_memory=memory
            )
            self._end(sequence_id, failure)
        if out.plan.refine:
            # Their answers are complete without it.
            self._end_refined(out.plan, StepResult())

    def _end_refined(self, plan: StepPlan, result: StepResult) -> None:
        """Ends the requests whose masks were in a step. A mask that could not be refined leaves the coarse outline."""
        self._is_refining = self._scheduler.is_refining
        for row in plan.refine:
            active = self._active.get(row.sequence_id)
            if active is not None:
                assert active.finish is not None
                mask = result.refined.get(row.sequence_id)
                if mask is None:
                    logger.error("request %s: the refiner failed", active.work.request_id)
                self._end(row.sequence_id, active.finish, refined=mask)

    def _refine(self, sequence_id: int, row: RefineRow | None) -> None:
        active = self._active.get(sequence_id)
        if active is None:
            return
        assert active.finish is not None
        if row is None:
            self._end(sequence_id, active.finish)
        else:
            self._scheduler.refine(row)
            self._is_refining = True

    def _not_finite(self, sequence_id: int) -> None:
        """Ends a request whose row gave NaN or infinity."""
        active = self._active[sequence_id]
        logger.error(
            "request %s: the model gave numbers that are not finite, after %d tokens",
            active.work.request_id,
            active.num_sampled,
        )
        self._scheduler.discard(sequence_id)
        self._end(
            sequence_id,
            RuntimeFailure("the model gave numbers that are not finite for this request"),
        )

    def _consume(self, active: _Active, sequence: Sequence, token: StepToken) -> None:
        work = active.work
        max_tokens = work.submission.max_tokens
        active.last_token_at = self._beat_at
        if active.first_token_at is None:
            active.first_token_at = self._beat_at
        try:
            finish = work.control.accept(token)
            if finish is None and sequence.num_sampled == max_tokens:
                finish = "length"
            if finish is None:
                self._resume(active, sequence)
                assert (
                    sequence.rule is not None
                    or sequence.in_flight
                    or sequence.num_planned == max_tokens
                )
        except Exception as error:
            self._skill_failed(sequence.sequence_id, error)
            return
        if finish is None:
            self._outbox.append(
                StepReport(sequence.sequence_id, work.output, sequence.num_sampled, token)
            )
        else:
            # The stop token is no part of the output.
            stopped = finish == "stop"
            last, stop = (None, token) if stopped else (token, None)
            if work.refines:
                self._draft(active, sequence, finish, last)
            else:
                self._end(sequence.sequence_id, finish, last, stop=stop)

    def _draft(
        self, active: _Active, sequence: Sequence, finish: FinishReason, token: StepToken | None
    ) -> None:
        """Ends a sequence, but not its request, whose outline the delivery thread may want refined."""
        active.finish = finish
        sequence_id, (image,) = sequence.sequence_id, active.work.submission.images
        self._scheduler.abort(sequence_id)
        report = StepReport(sequence_id, active.work.output, sequence.num_sampled, token)
        report.to_refine = image
        self._outbox.append(report)

    def _skill_failed(self, sequence_id: int, error: Exception) -> None:
        """Called when a skill raised or gave an impossible rule. The fault ends its own request only.

        A RequestError is the caller's fault: a constraint that is too complex to follow."""
        if isinstance(error, RequestError):
            self._end(sequence_id, error)
            return
        logger.error("the skill of sequence %d failed", sequence_id, exc_info=error)
        failure = RuntimeFailure("the skill failed on a sampled token")
        self._end(sequence_id, error if isinstance(error, SkillFault) else failure)

    def _begin_profile(self, profile: StepProfile) -> None:
        self._end_profile()
        self._profile = profile
        profile.begin()
        self._beat_at = (
            self._clock()
        )  # A profiler's first start takes seconds in which nothing hangs.

    def _end_profile(self) -> None:
        if self._profile is not None:
            self._profile.end()
            self._profile = None

    def _add(self, work: Work) -> None:
        submission = work.submission
        active = self._active[submission.sequence_id] = _Active(work)
        try:
            if self._check_rule is not None:
                self._check_rule(submission.rule)
        except SkillFault as error:
            self._skill_failed(submission.sequence_id, error)
            return
        active.sequence = self._scheduler.add(submission)

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self._active:
            self._end(sequence_id, "cancelled")

    def _refuse(self, sequence_id: int, error: KestrelError) -> None:
        if sequence_id in self._active:
            self._end(sequence_id, error)

    def _expire(self, work: Work) -> None:
        waited = self._clock() - work.submission.arrived_at
        error: KestrelError
        if work.queue_limited:
            error = QueueTimeout(
                f"the request waited {waited:.1f} s, the limit is max_queue_wait_s"
            )
        else:
            error = DeadlineExceeded(f"the deadline passed after {waited:.1f} s in the queue")
        self._end(work.submission.sequence_id, error)

    def _fail_all(self, error: KestrelError) -> None:
        while True:  # Requests whose command was never run must end, too.
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command()
        for sequence_id in list(self._active):
            self._end(sequence_id, error)

    def _end(
        self,
        sequence_id: int,
        reason: FinishReason | KestrelError,
        token: StepToken | None = None,
        embedding: Embedding | None = None,
        refined: np.ndarray | None = None,
        stop: StepToken | None = None,
    ) -> None:
        active = self._active.pop(sequence_id)
        if active.finish is None:
            self._scheduler.abort(sequence_id)
        else:
            self._scheduler.abort_refinement(sequence_id)
        self._outbox.append(
            StepReport(
                sequence_id,
                active.work.output,
                active.num_sampled,
                token,
                SequenceEnd(reason, active.timings(self._clock()), refined, stop),
                embedding=embedding,
            )
        )

    def _flush(self) -> None:
        self._stats = self._scheduler.stats
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._delivery.put(batch)

    def _observe(self, out: _Out, result: StepResult, *, failed: bool) -> None:
        if self._observer is None:
            return
        plan = out.plan
        ids = [row.sequence_id for row in plan.prefill + plan.decode]
        ids += [read.sequence_id for read in plan.embed] + [r.sequence_id for r in plan.refine]
        encoded = {piece.image.key for piece in plan.encode}
        num_tokens, gaps = self._gaps(result)
        event = StepEvent(
            step_id=plan.step_id,
            launched_at=out.launched_at,
            collected_at=self._clock() if failed else self._beat_at,
            vision_s=result.vision_s,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            num_crops=sum(piece.num_encoded for piece in plan.encode),
            num_reused_crops=sum(len(piece.reused) for piece in plan.encode),
            num_prefill_positions=sum(
                num_positions(tuple(t for t in row.tokens if t is not PREVIOUS))
                for row in plan.prefill
            ),
            num_decode=len(plan.decode),
            request_ids=tuple(self._active[i].work.request_id for i in ids if i in self._active),
            encoded_request_ids=self._about(encoded) if encoded else (),
            failed=failed,
            stats=self._scheduler.stats,
            shared_groups=result.shared_groups,
            num_masked=sum(
                row.sample is not None and row.sample.rule.mask is not None
                for row in plan.prefill + plan.decode
            ),
            num_tokens=num_tokens,
            token_gaps=gaps,
        )
        try:
            self._observer.on_step(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on a step")

    def _gaps(self, result: StepResult) -> tuple[int, tuple[tuple[float, int], ...]]:
        """How many tokens go to requests, and the gaps before them. Most gaps are equal, so they are counted."""
        before: dict[float | None, int] = {}
        for sequence_id in result.tokens:
            active = self._active.get(sequence_id)
            if active is not None:
                last = active.last_token_at
                before[last] = before.get(last, 0) + 1
        gaps = tuple((self._beat_at - last, n) for last, n in before.items() if last is not None)
        return sum(before.values()), gaps

    def _about(self, keys: set[str]) -> tuple[str, ...]:
        """Requests about one of the images."""
        works = [active.work for active in self._active.values()]
        return tuple(
            work.request_id
            for work in works
            if any(image.key in keys for image in work.submission.images)
        )
