"""Scheduler: which sequences compute what in the next step.

Owns the lanes with the steps that are out. Pure Python; knows no tensor, text, skill or clock. One thread uses it.
Several steps may be out at a time; they run in the order scheduled, or in two lanes (types.step.Lane). What a step of
each lane computes is in lanes/.
"""

from __future__ import annotations

from ..types.info import SchedulerStats
from ..types.step import Lane, RefineRow, RuntimeLimits, StepPlan, StepResult, StepToken, TokenRule
from ..types.submission import Submission
from .batch import Batch
from .draft import Draft
from .lanes.all import AllLane
from .lanes.beside import Beside
from .lanes.decode import DecodeLane
from .lanes.intake import Intake
from .lanes.lane import Out, StepLane
from .lanes.new_work import NewWorkLane
from .policy import SchedulerPolicy
from .sequence import Phase, Sequence
from .shares import Shares


class Scheduler:
    """add / schedule / commit / resume; every sequence ends by abort, discard or fail_step."""

    def __init__(self, limits: RuntimeLimits, policy: SchedulerPolicy | None = None) -> None:
        policy = policy or SchedulerPolicy()
        self._limits = limits
        shares = Shares(limits.max_batch_size)
        batch = self._batch = Batch(limits, policy, shares)
        intake = self._intake = Intake(batch, policy, shares)
        beside = self._beside = Beside(policy.itl_target_s, room=limits.leaves_room)
        lanes: list[StepLane] = [AllLane(batch, shares, intake, policy)]
        if limits.decodes_beside:
            new_work = NewWorkLane(batch, shares, intake, beside)
            lanes = [DecodeLane(batch, shares, beside), new_work]
        self._lanes = {lane.kind: lane for lane in lanes}
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        unfinished = len(self._batch) or self._intake.masks or self._intake.is_flushing
        return bool(unfinished or any(lane.out for lane in self._lanes.values()))

    @property
    def is_decoding_beside(self) -> bool:
        """Whether the next step of the lane DECODE runs beside new work."""
        return self._beside.is_beside

    @property
    def stats(self) -> SchedulerStats:
        return self._batch.stats

    def fits(self, num_prompt_positions: int, max_tokens: int) -> bool:
        """Whether a sequence of that size can ever run to its end."""
        return self._batch.fits(num_prompt_positions, max_tokens)

    def add(self, submission: Submission) -> Sequence:
        """Queues a new sequence, which must be one that ``fits``, and returns it."""
        return self._batch.add(submission)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence in any phase, also while a step that computes it is out, and frees its pages. Its computed
        prefix stays in the prefix cache as long as there is room. Unknown ids are ignored."""
        sequence = self._batch.find(sequence_id)
        if sequence is not None:
            self._batch.end(sequence, keep=True)

    def refine(self, row: RefineRow) -> None:
        """Queues a mask for the next steps. Its sequence has ended, so it holds neither pages nor a batch place."""
        self._intake.masks.append(row)

    def abort_refinement(self, sequence_id: int) -> None:
        """Removes a queued mask. Without effect if a step has it, or if there is none."""
        self._intake.drop_mask(sequence_id)

    @property
    def is_refining(self) -> bool:
        """Whether masks are queued, or in a step that is out."""
        return bool(self._intake.masks) or any(out.plan.refine for out in self._out)

    def expired(self, now: float) -> list[int]:
        """Sequences that wait and whose deadline has passed; the caller ends them."""
        return self._batch.expired(now)

    def take_admitted(self) -> list[Sequence]:
        """Sequences that were admitted for the first time since the last call."""
        return self._batch.take_admitted()

    def schedule(self, now: float = 0.0, lane: Lane = Lane.ALL) -> StepPlan | None:
        """The next step of a lane, or None if nothing can be computed now. commit() or fail_step() must follow, in the
        order of the lane, and for a step after the one that its ``after`` names."""
        steps = self._lanes[lane]
        self._batch.replace_running(now)
        steps.turns.begin(self._batch.running.values(), now, idle=not steps.out)
        plan = self._plan(now, steps)
        if plan is None and steps.turns.alone and not steps.out:
            # The favoured sequences have nothing to compute, and no step is out that could change that.
            steps.turns.for_all()
            plan = self._plan(now, steps)
        return plan

    def _plan(self, now: float, lane: StepLane) -> StepPlan | None:
        """The step for the sequences whose turn it is; None if it would be empty."""
        draft = Draft(self._batch.images, self._limits.page_size)
        lane.add_rows(draft)
        while (admitted := self._batch.admit(now)) is not None:
            lane.add_admitted(draft, admitted)
        lane.add_new_work(draft, now)
        if draft.is_empty:
            # Ended sequences and images to drop wait for the next step with rows. A step for them alone would delay the
            # next request and the delivery of the last one.
            self._batch.images.give_back_dropped(draft.dropped)
            return None
        lane.settle(draft, self._next_step_id)
        plan = draft.plan(self._next_step_id, lane.kind, self._batch.take_ended())
        if plan.is_empty:
            return None
        self._next_step_id += 1
        lane.launched(plan, draft.scheduled)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, StepToken]]:
        """Takes the result of the oldest step that is out. Returns the tokens of sequences that have not ended.
        Sequences whose row was not finite must have ended by discard().

        After that, a sequence whose ``rule`` is None and that has no token in flight waits for resume() or abort().
        Other sequences do not wait for it.
        """
        sampled: list[tuple[Sequence, StepToken]] = []
        self._batch.images.crops.came_back(plan.encode, failed=False)
        seconds = result.vision_s + result.prefill_s
        for item in self._lanes[plan.lane].came_back(plan, seconds):
            sequence = item.sequence
            if sequence.phase is Phase.FINISHED:
                continue
            if item.epoch == sequence.epoch:
                sequence.num_committed = item.end_positions
            if item.samples:
                token = result.tokens[sequence.sequence_id]
                sequence.take(token)
                sampled.append((sequence, token))
            if item.is_prefill and item.epoch == sequence.epoch:
                self._batch.keep_prefix(sequence)
        return sampled

    def resume(self, sequence_id: int, rule: TokenRule) -> None:
        """Sets the rule of the next token, which may be before the tokens in flight have come back."""
        sequence = self._batch.find(sequence_id)
        assert sequence is not None
        assert sequence.num_planned < sequence.submission.max_tokens, (
            f"sequence {sequence_id} is at its limit of tokens"
        )
        sequence.rule = rule

    def discard(self, sequence_id: int) -> None:
        """Ends a sequence whose row was not finite. What it computed leaves the prefix cache."""
        sequence = self._batch.find(sequence_id)
        assert sequence is not None
        self._batch.discard(sequence)

    def fail_step(self, plan: StepPlan) -> list[int]:
        """Rolls back the oldest step that is out: ends the sequences it computed, or encoded crops for, and returns
        their ids.

        No state on the device is trusted after that: unused cached prefixes and all embeddings are dropped.
        """
        images = {piece.image.key for piece in plan.encode}
        self._batch.images.crops.came_back(plan.encode, failed=True)
        # Later steps that are out do not encode the rest of these images.
        for later in self._out:
            for piece in later.plan.encode:
                if piece.image.key in images:
                    self._batch.images.crops.forget(piece.kept_keys)
        involved = [item.sequence for item in self._lanes[plan.lane].came_back(plan, None)]
        involved += [
            s for s in self._batch.running.values() if any(p.image.key in images for p in s.needed)
        ]
        # Later steps that are out may compute prefixes of images that this one should have encoded.
        involved += [
            item.sequence
            for later in self._out
            for item in later.scheduled
            if images.intersection(item.images)
        ]
        failed = []
        for sequence in involved:
            if sequence.phase is not Phase.FINISHED:
                failed.append(sequence.sequence_id)
                self._batch.end(sequence, keep=False)
        self._batch.reset()
        return failed

    def flush(self) -> None:
        """Drops cached prefixes and embeddings without users. The next step drops them in the runtime."""
        self._intake.flush()

    def check(self) -> None:
        """Raises AssertionError unless pages, tree, phases, shares and counts agree."""
        kept = [key for out in self._out for piece in out.plan.encode for key in piece.kept_keys]
        self._batch.images.crops.check(kept)
        self._batch.check()

    @property
    def _out(self) -> list[Out]:
        """The steps that are out."""
        return [out for lane in self._lanes.values() for out in lane.out]
