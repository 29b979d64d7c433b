"""EngineLoop: schedule, launch, collect, commit, in one thread.

Owns the scheduler, the active requests (active.py) and the runtime; no other thread uses them. Up to ``depth`` steps
are out at a time: step N + 1 is launched before step N is read, with the rules that are known ahead, and rows of
sequences that turn out to have ended are dropped. With two lanes (types.step.Lane), ``depth`` is that of the decode
lane, or less while it runs beside new work. Commands come in through one queue, reports go out to the delivery thread,
and ``stats`` is an immutable snapshot.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from .. import clock
from ..errors import EngineClosed, KestrelError, RuntimeFailure
from ..runtime.profile import StepProfile
from ..runtime.protocol import Runtime, StepHandle
from ..scheduler.policy import SchedulerPolicy
from ..scheduler.scheduler import Scheduler
from ..skills.rule_check import RuleCheck
from ..types.info import SchedulerStats
from ..types.observer import Observer
from ..types.step import Lane, RefineRow, StepPlan, StepResult
from .active import ActiveRequests, SkillSubmission
from .delivery import DeliveryThread
from .observing import StepEvents

logger = logging.getLogger(__name__)

EXIT_PATIENCE_S = 5.0
"""Seconds that a program without a call of shutdown() waits at its end for the running step."""

PIPELINE_DEPTH = 2
"""The default for steps out at a time: one runs while the host works on the other."""
NEW_WORK_DEPTH = 2
"""Steps out in the lane of new work: one runs, and the next one is there when it ends."""
BESIDE_DEPTH = 2
"""The most decode steps out beside new work. There they take twice as long or more, so the host keeps up with fewer of
them. And a sequence whose prompt was computed joins only steps that are launched later."""


RULE_PATIENCE_S = 0.004
"""Seconds in which the loop waits for rules that other threads are about to have, so that their rows join a step."""


@dataclass(slots=True)
class _Out:
    """A step that is out. Never changed; not frozen, because that would double its cost."""

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
        check_rule: RuleCheck | None = None,
    ) -> None:
        """``check_rule``: None trusts all skills."""
        self._runtime = runtime
        self._delivery = delivery
        two = runtime.limits.decodes_beside
        self._depths = (
            {Lane.NEW_WORK: NEW_WORK_DEPTH, Lane.DECODE: depth} if two else {Lane.ALL: depth}
        )
        self._scheduler = Scheduler(runtime.limits, policy)
        self._stats = self._scheduler.stats
        # Unbounded here because the engine admits a bounded number of requests, each of which sends two commands, and
        # one for each rule that another thread computes.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests = ActiveRequests(self._scheduler, check_rule, self._commands.put)
        self._events = (
            None if observer is None else StepEvents(observer, self._scheduler, self._requests)
        )
        self._has_no_step = False
        """Whether all requests wait for rules that other threads compute."""
        self._out: dict[Lane, deque[_Out]] = {lane: deque() for lane in self._depths}
        """The steps that are out, in the order of their launch."""
        self._profile: StepProfile | None = None
        self._is_collecting = False
        """Whether a step is waited for. It may have outlived its requests, and others wait for it unseen."""
        self._beat_at = clock.now()
        self.thread = threading.Thread(target=self._run, name="kestrel-steps", daemon=True)
        """The thread that steps. Only this object starts it."""

    def start(self) -> None:
        self.thread.start()
        # An interpreter that ends while a thread is inside torch aborts the whole process.
        atexit.register(self.stop, EXIT_PATIENCE_S)

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    @property
    def stats(self) -> SchedulerStats:
        """Any thread. The counts after the last command or step."""
        return self._stats

    @property
    def stalled_s(self) -> float:
        """Any thread. Seconds since the last command or collected step, while there is work; else 0."""
        stats = self._stats
        has_step = self._is_collecting or any(self._out.values())
        has_work = has_step or stats.running or stats.waiting or self._requests.is_refining
        return clock.now() - self._beat_at if has_work else 0.0

    def submit(self, submitted: SkillSubmission) -> None:
        """Any thread. The delivery thread reports the request's outcome."""
        self._commands.put(lambda: self._requests.add(submitted))

    def abort(self, sequence_id: int) -> None:
        """Any thread. Ends a request as "cancelled" before the next step; without effect if it has ended."""
        self._commands.put(lambda: self._requests.abort(sequence_id))

    def refuse(self, sequence_id: int, error: KestrelError) -> None:
        """Any thread. Ends a request with ``error`` before the next step; without effect if it has ended."""
        self._commands.put(lambda: self._requests.refuse(sequence_id, error))

    def refine(self, sequence_id: int, row: RefineRow | None) -> None:
        """Any thread. Continues a request whose report had ``to_refine``: refines the mask of ``row`` in one of the
        next steps, or, without a row, ends the request. Without effect if the request has ended."""
        self._commands.put(lambda: self._requests.refine(sequence_id, row))

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
        if self.thread.is_alive():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Any thread. Whether a turn would wait for a command."""
        return self._commands.empty() and (self._has_no_step or not self._scheduler.has_work)

    def turn(self) -> bool:
        """The loop's thread, until it returns False. Runs the commands in the queue, or waits for one if there is no
        other work. Then launches a step, collects one, or does both."""
        error: KestrelError = EngineClosed("the engine was shut down")
        try:
            if self._take_commands():
                self._advance()
                self._flush()
                return True
        except BaseException as failure:  # The loop's edge: no caller may wait for a dead thread.
            logger.exception("the step loop died")
            error = RuntimeFailure(f"the engine failed: {type(failure).__name__}")
        try:
            self._fail_all(error)
        finally:
            self._end_profile()
            self._flush()
            self._runtime.close()
        return False

    def _run(self) -> None:
        while self.turn():
            pass

    def _take_commands(self) -> bool:
        """Runs the commands in the queue; waits for one if there is no other work. False: stop."""
        waits = not self._scheduler.has_work or self._has_no_step
        until = clock.now() + RULE_PATIENCE_S
        while True:
            try:
                command = self._next_command(waits, until)
            except queue.Empty:
                return True
            waits = self._has_no_step = False
            self._beat_at = clock.now()
            if command is None:
                return False
            command()
            self._flush()

    def _next_command(self, waits: bool, until: float) -> Callable[[], None] | None:
        """``waits``: there is no other work. Raises queue.Empty if there is no command."""
        if waits:
            command: Callable[[], None] | None = clock.get(self._commands, None)
            return command
        if self._requests.awaits_quick_rule and (left := until - clock.now()) > 0:
            command = clock.get(self._commands, left)
            return command
        return self._commands.get_nowait()

    def _advance(self) -> None:
        """Launches a step if the pipeline has room, then collects the oldest if the pipeline is full or stuck."""
        self._collect_new_work()
        now = clock.now()
        for sequence_id in self._scheduler.expired(now):
            self._requests.expire(sequence_id)
        plan = self._schedule(now)
        self._requests.admitted(self._scheduler.take_admitted())
        if plan is not None:
            self._launch(plan, now)
        self._has_no_step = plan is None and not any(self._out.values())
        if self._has_no_step:
            assert self._requests.awaits_rule or not self._requests.is_generating, (
                "there is work, but no step to be made of it"
            )
        if any(self._out.values()) and (plan is None or not any(map(self._has_room, self._out))):
            self._collect(self._lane_to_collect())

    def _schedule(self, now: float) -> StepPlan | None:
        """The next step of a lane that has room. New work first: it waits for the decode steps launched before it."""
        for lane in self._out:
            if self._has_room(lane):
                plan = self._scheduler.schedule(now, lane)
                if plan is not None:
                    return plan
        return None

    def _has_room(self, lane: Lane) -> bool:
        depth = self._depths[lane]
        if lane is Lane.DECODE and self._scheduler.is_decoding_beside:
            depth = min(depth, BESIDE_DEPTH)
        return len(self._out[lane]) < depth

    def _launch(self, plan: StepPlan, now: float) -> None:
        try:
            handle = self._runtime.launch(plan)
        except Exception as error:
            # The loop's edge, as in _collect; steps fail in order, so those before it come first.
            while any(self._out.values()):
                self._collect(self._lane_to_collect())
            logger.exception("step %d could not be launched", plan.step_id)
            self._fail_step(_Out(plan, None, now), error)
            return
        self._out[plan.lane].append(_Out(plan, handle, now))
        self._requests.launched(plan)

    def _lane_to_collect(self) -> Lane:
        """The lane whose oldest step is read next. Decode steps are short: to wait for one delays the other little."""
        heads = {lane: out[0] for lane, out in self._out.items() if out}
        decode, new_work = heads.get(Lane.DECODE), heads.get(Lane.NEW_WORK)
        if decode is None or new_work is None:
            return next(iter(heads))
        after = decode.plan.after
        if after is not None and after >= new_work.plan.step_id:
            return Lane.NEW_WORK
        assert new_work.handle is not None
        return Lane.NEW_WORK if self._runtime.is_done(new_work.handle) else Lane.DECODE

    def _collect_new_work(self) -> None:
        """Collects the steps of NEW_WORK that have ended, so that the next decode step has their sequences."""
        out = self._out.get(Lane.NEW_WORK)
        while out:
            handle = out[0].handle
            assert handle is not None
            if not self._runtime.is_done(handle):
                return
            self._collect(Lane.NEW_WORK)

    def _collect(self, lane: Lane) -> None:
        out = self._out[lane].popleft()
        try:
            assert out.handle is not None
            self._is_collecting = True
            result = self._runtime.collect(out.handle)
        except (
            Exception
        ) as error:  # The loop's edge: a failed step ends its requests, not the engine.
            logger.exception("step %d failed", out.plan.step_id)
            self._fail_step(out, error)
            return
        finally:
            self._is_collecting = False
        self._beat_at = clock.now()
        if self._profile is not None:
            self._profile.step()
            if self._profile.ended.done():
                self._profile = None
        if self._events is not None:
            self._events.tell(
                out.plan,
                result,
                launched_at=out.launched_at,
                collected_at=self._beat_at,
                failed=False,
            )
        self._requests.collected(out.plan, result, self._beat_at)

    def _fail_step(self, out: _Out, error: Exception) -> None:
        if self._events is not None:
            self._events.tell(
                out.plan,
                StepResult(),
                launched_at=out.launched_at,
                collected_at=clock.now(),
                failed=True,
            )
        self._requests.failed(out.plan, error)

    def _begin_profile(self, profile: StepProfile) -> None:
        self._end_profile()
        self._profile = profile
        profile.begin()
        self._beat_at = (
            clock.now()
        )  # A profiler's first start takes seconds in which nothing hangs.

    def _end_profile(self) -> None:
        if self._profile is not None:
            self._profile.end()
            self._profile = None

    def _fail_all(self, error: KestrelError) -> None:
        while True:  # Requests whose command was never run must end, too.
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command()
        self._requests.fail_all(error)

    def _flush(self) -> None:
        self._stats = self._scheduler.stats
        if reports := self._requests.take_reports():
            self._delivery.put(reports)
