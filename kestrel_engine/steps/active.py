"""ActiveRequests: the requests that have not ended, on the step thread.

Owns them with their skill's controls, and the reports of their tokens and ends. The scheduler owns their sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from .. import clock
from ..errors import (
    ConstraintsCostly,
    DeadlineExceeded,
    KestrelError,
    QueueTimeout,
    RequestError,
    RuntimeFailure,
    SkillFault,
)
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import Sequence
from ..skills.base import SkillControl, SkillOutput
from ..skills.objects.outline import OutlineOutput
from ..skills.rule_check import RuleCheck
from ..types.events import FinishReason
from ..types.step import RefineRow, RuleWait, StepPlan, StepResult, StepToken, TokenRule
from ..types.submission import Submission
from ..types.timings import StepTimings
from .delivery import SequenceEnd, StepReport
from .device_time import of_each_decode, of_new_work

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SkillSubmission:
    """A submission with the control and the output that its skill has made."""

    request_id: str
    submission: Submission
    control: SkillControl
    output: SkillOutput
    queue_limited: bool = False
    """The submission's deadline is the engine's bound on waiting, not the caller's."""


@dataclass(slots=True, eq=False)
class _Active:
    """A request that has not ended, on the step thread."""

    submitted: SkillSubmission
    sequence: Sequence | None = None
    """None until the scheduler has it."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    device_s: float = 0.0
    """Seconds of the device that belong to the request so far (device_time.py)."""
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
            device_s=self.device_s,
        )


class ActiveRequests:
    """``check_rule``: None trusts all skills. ``post``: has a command run on the step thread, from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        check_rule: RuleCheck | None,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._scheduler = scheduler
        self._check_rule = check_rule
        self._post = post
        self._active: dict[int, _Active] = {}
        self._rule_waits: dict[int, RuleWait] = {}
        """The rules that other threads compute, by sequence id."""
        self._reports: list[StepReport] = []
        self.is_refining = False
        """Whether masks are queued, or out in a step."""

    @property
    def is_generating(self) -> bool:
        """Whether a request waits for tokens."""
        return any(active.finish is None for active in self._active.values())

    @property
    def awaits_rule(self) -> bool:
        """Whether another thread computes a request's rule."""
        return bool(self._rule_waits)

    @property
    def awaits_quick_rule(self) -> bool:
        """Whether one of these rules will be there soon."""
        return self.awaits_rule and any(wait.is_quick for wait in self._rule_waits.values())

    def take_reports(self) -> list[StepReport]:
        """What happened since the last call, in order."""
        reports, self._reports = self._reports, []
        return reports

    def add(self, submitted: SkillSubmission) -> None:
        submission = submitted.submission
        active = self._active[submission.sequence_id] = _Active(submitted)
        try:
            if self._check_rule is not None:
                self._check_rule(submission.rule)
        except SkillFault as error:
            self._skill_failed(submission.sequence_id, error)
            return
        active.sequence = self._scheduler.add(submission)

    def abort(self, sequence_id: int) -> None:
        """Ends a request as "cancelled"."""
        if sequence_id in self._active:
            self._end(sequence_id, "cancelled")

    def refuse(self, sequence_id: int, error: KestrelError) -> None:
        if sequence_id in self._active:
            self._end(sequence_id, error)

    def expire(self, sequence_id: int) -> None:
        """Ends a request whose deadline passed while it waited."""
        submitted = self._active[sequence_id].submitted
        waited = clock.now() - submitted.submission.arrived_at
        error: KestrelError
        if submitted.queue_limited:
            error = QueueTimeout(
                f"the request waited {waited:.1f} s, the limit is max_queue_wait_s"
            )
        else:
            error = DeadlineExceeded(f"the deadline passed after {waited:.1f} s in the queue")
        self._end(submitted.submission.sequence_id, error)

    def refine(self, sequence_id: int, row: RefineRow | None) -> None:
        """Queues the mask of a request whose tokens have all come; None: ends the request."""
        active = self._active.get(sequence_id)
        if active is None:
            return
        assert active.finish is not None
        if row is None:
            self._end(sequence_id, active.finish)
        else:
            self._scheduler.refine(row)
            self.is_refining = True

    def admitted(self, sequences: Iterable[Sequence]) -> None:
        """Reports that sequences were admitted for the first time."""
        for sequence in sequences:
            output = self._active[sequence.sequence_id].submitted.output
            admitted_at = sequence.admitted_at
            self._reports.append(
                StepReport(sequence.sequence_id, output, 0, admitted_at=admitted_at)
            )

    def launched(self, plan: StepPlan) -> None:
        """Gives the scheduler the rules of the next tokens, as far as they are known ahead."""
        for row in plan.prefill + plan.decode:
            if row.sample is not None:
                try:
                    active = self._active[row.sequence_id]
                    assert active.sequence is not None
                    self._resume(active, active.sequence)
                except Exception as error:
                    self._skill_failed(row.sequence_id, error)

    def collected(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Takes the result of a step that has come back."""
        for sequence_id, seconds in of_new_work(plan, result):
            if (worked_for := self._active.get(sequence_id)) is not None:
                worked_for.device_s += seconds
        for sequence_id in result.non_finite & self._active.keys():
            self._not_finite(sequence_id)
        decode_s = of_each_decode(plan, result)
        prefilled = {row.sequence_id for row in plan.prefill} if plan.prefill else ()
        for sequence, token in self._scheduler.commit(plan, result):
            active = self._active[sequence.sequence_id]
            if sequence.sequence_id not in prefilled:
                active.device_s += decode_s
            self._consume(active, sequence, token, now)
        for sequence_id in result.readings.keys() & self._active.keys():
            active = self._active[sequence_id]
            active.first_token_at = active.last_token_at = now
            self._end(sequence_id, "stop", reading=result.readings[sequence_id])
        if plan.refine:
            self._end_refined(plan, result)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that has failed."""
        memory = isinstance(error, MemoryError)
        why = ": the device is out of memory" if memory else ""
        for sequence_id in self._scheduler.fail_step(plan):
            failure = RuntimeFailure(
                f"the step that computed this request failed{why}", out_of_memory=memory
            )
            self._end(sequence_id, failure)
        if plan.refine:
            # Their answers are complete without it.
            self._end_refined(plan, StepResult())

    def fail_all(self, error: KestrelError) -> None:
        for sequence_id in list(self._active):
            self._end(sequence_id, error)

    def request_ids(self, sequence_ids: Iterable[int]) -> tuple[str, ...]:
        """The ids of those of the requests that have not ended."""
        return tuple(
            self._active[i].submitted.request_id for i in sequence_ids if i in self._active
        )

    def about(self, keys: Collection[str]) -> tuple[str, ...]:
        """The ids of the requests about one of the images."""
        every = [active.submitted for active in self._active.values()]
        return tuple(
            submitted.request_id
            for submitted in every
            if any(image.key in keys for image in submitted.submission.images)
        )

    def gaps(self, result: StepResult, now: float) -> tuple[int, tuple[tuple[float, int], ...]]:
        """How many tokens go to requests, and the gaps before them. Most gaps are equal, so they are counted."""
        before: dict[float | None, int] = {}
        for sequence_id in result.tokens:
            active = self._active.get(sequence_id)
            if active is not None:
                last = active.last_token_at
                before[last] = before.get(last, 0) + 1
        gaps = tuple((now - last, n) for last, n in before.items() if last is not None)
        return sum(before.values()), gaps

    def _resume(self, active: _Active, sequence: Sequence) -> None:
        """Gives the scheduler the next rule as soon as it is known."""
        submitted = active.submitted
        index = sequence.num_planned
        if sequence.rule is None and index < submitted.submission.max_tokens:
            rule = submitted.control.rule(index)
            # The first question is cheap. The second one, about an abstract class, is not.
            if rule.__class__ is not TokenRule and isinstance(rule, RuleWait):
                self._rule_waits[sequence.sequence_id] = rule
                rule.begin(partial(self._post, partial(self._rule_is_there, sequence.sequence_id)))
            elif rule is not None:
                check = self._check_rule
                # Looked up here: this runs for every token of every row.
                if check is not None and check.passed.get(id(rule)) is not rule:
                    check(rule)
                self._scheduler.resume(sequence.sequence_id, rule)

    def _rule_is_there(self, sequence_id: int) -> None:
        """Another thread has computed the rule for which a request waited."""
        if self._rule_waits.pop(sequence_id, None) is None:
            return  # The request has ended.
        active = self._active[sequence_id]
        assert active.sequence is not None
        try:
            self._resume(active, active.sequence)
        except Exception as error:
            self._skill_failed(sequence_id, error)

    def _consume(self, active: _Active, sequence: Sequence, token: StepToken, now: float) -> None:
        submitted = active.submitted
        max_tokens = submitted.submission.max_tokens
        active.last_token_at = now
        if active.first_token_at is None:
            active.first_token_at = now
        try:
            finish = submitted.control.accept(token)
            if finish is None and sequence.num_sampled == max_tokens:
                finish = "length"
            # Mostly, the rule was set at the launch.
            if finish is None and sequence.rule is None:
                self._resume(active, sequence)
                assert (
                    sequence.rule is not None
                    or sequence.in_flight
                    or sequence.num_planned == max_tokens
                    or sequence.sequence_id in self._rule_waits
                )
        except Exception as error:
            self._skill_failed(sequence.sequence_id, error)
            return
        if finish is None:
            self._reports.append(
                StepReport(sequence.sequence_id, submitted.output, sequence.num_sampled, token)
            )
        else:
            # The stop token is no part of the output.
            stopped = finish == "stop"
            last, stop = (None, token) if stopped else (token, None)
            if isinstance(submitted.output, OutlineOutput) and submitted.output.refines:
                self._draft(active, sequence, finish, last)
            else:
                self._end(sequence.sequence_id, finish, last, stop=stop)

    def _draft(
        self, active: _Active, sequence: Sequence, finish: FinishReason, token: StepToken | None
    ) -> None:
        """Ends a sequence, but not its request, whose outline the delivery thread may want refined."""
        active.finish = finish
        sequence_id, (image,) = sequence.sequence_id, active.submitted.submission.images
        self._scheduler.abort(sequence_id)
        report = StepReport(sequence_id, active.submitted.output, sequence.num_sampled, token)
        report.to_refine = image
        self._reports.append(report)

    def _skill_failed(self, sequence_id: int, error: Exception) -> None:
        """Called when a skill raised or gave an impossible rule. The fault ends its own request only.

        A constraint that is too complex to follow, or too costly, is the caller's fault. MaskThreads report what is the
        server's."""
        if isinstance(error, (RequestError, ConstraintsCostly, RuntimeFailure)):
            self._end(sequence_id, error)
            return
        logger.error("the skill of sequence %d failed", sequence_id, exc_info=error)
        failure = RuntimeFailure("the skill failed on a sampled token")
        self._end(sequence_id, error if isinstance(error, SkillFault) else failure)

    def _not_finite(self, sequence_id: int) -> None:
        """Ends a request whose row gave NaN or infinity."""
        active = self._active[sequence_id]
        logger.error(
            "request %s: the model gave numbers that are not finite, after %d tokens",
            active.submitted.request_id,
            active.num_sampled,
        )
        self._scheduler.discard(sequence_id)
        self._end(
            sequence_id,
            RuntimeFailure("the model gave numbers that are not finite for this request"),
        )

    def _end_refined(self, plan: StepPlan, result: StepResult) -> None:
        """Ends the requests whose masks were in a step. A mask that could not be refined leaves the coarse outline."""
        self.is_refining = self._scheduler.is_refining
        for row in plan.refine:
            active = self._active.get(row.sequence_id)
            if active is not None:
                assert active.finish is not None
                mask = result.refined.get(row.sequence_id)
                if mask is None:
                    logger.error("request %s: the refiner failed", active.submitted.request_id)
                self._end(row.sequence_id, active.finish, reading=mask)

    def _end(
        self,
        sequence_id: int,
        reason: FinishReason | KestrelError,
        token: StepToken | None = None,
        reading: object | None = None,
        stop: StepToken | None = None,
    ) -> None:
        active = self._active.pop(sequence_id)
        if (wait := self._rule_waits.pop(sequence_id, None)) is not None:
            wait.drop()
        if active.finish is None:
            self._scheduler.abort(sequence_id)
        else:
            self._scheduler.abort_refinement(sequence_id)
        self._reports.append(
            StepReport(
                sequence_id,
                active.submitted.output,
                active.num_sampled,
                token,
                SequenceEnd(reason, active.timings(clock.now()), reading, stop),
            )
        )
