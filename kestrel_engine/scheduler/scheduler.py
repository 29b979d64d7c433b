"""Scheduler: which sequences compute what in the next step.

Pure Python, ints in and ints out; it owns the steps that are out, and knows no tensor, text, skill or clock. One thread
uses it. Several steps may be out at a time; they run in the order scheduled, or in two lanes (types.step.Lane).

All sequences of the batch (batch.py) that can decode do so in every step. Beside them a step takes new work within its
allowance: text in chunks, images crop by crop, the positions of an image whole.
"""

from __future__ import annotations

from collections import deque

from ..types.info import SchedulerStats
from ..types.step import (
    MOST_REFINED,
    Lane,
    RefineRow,
    RuntimeLimits,
    StepPlan,
    StepResult,
    StepToken,
    TokenRule,
)
from ..types.submission import Submission
from .batch import Batch, preemption_rank
from .budget import Allowance, Pacer
from .draft import Draft
from .lanes.beside import Beside, Load
from .order.prefill_order import PrefillOrder
from .order.turns import Turns
from .policy import SchedulerPolicy
from .scheduled import Scheduled
from .sequence import Phase, Sequence
from .shares import Shares

CROPS_OF_A_MASK = 4
"""A mask to refine takes at most as long as this many crops of an image: one pass of the tower, and the refiner's."""


class Scheduler:
    """add / schedule / commit / resume; every sequence ends by abort, discard or fail_step."""

    def __init__(self, limits: RuntimeLimits, policy: SchedulerPolicy | None = None) -> None:
        self._limits = limits
        self._policy = policy or SchedulerPolicy()
        self._shares = Shares(limits.max_batch_size)
        self._batch = Batch(limits, self._policy, self._shares)
        two = limits.decodes_beside
        self._turns = {
            lane: Turns(self._shares)
            for lane in ((Lane.DECODE, Lane.NEW_WORK) if two else (Lane.ALL,))
        }
        self._order = PrefillOrder(self._policy, self._shares)
        self._out: dict[Lane, deque[tuple[StepPlan, list[Scheduled], bool]]]
        self._out = {lane: deque() for lane in self._turns}
        """Plans, their rows, and whether favoured sequences have them for themselves."""
        self._decode_lane = Beside(self._policy.itl_target_s, room=limits.leaves_room)
        self._flushing = False
        """Whether the next step is due even if it only drops images."""
        self._refine: deque[RefineRow] = deque()
        """Masks of sequences that have ended, in the order of their ends."""
        self._next_step_id = 0
        self._pacer = Pacer(self._policy.budget)

    @property
    def has_work(self) -> bool:
        unfinished = len(self._batch) or self._refine or self._flushing
        return bool(unfinished or any(self._out.values()))

    @property
    def is_decoding_beside(self) -> bool:
        """Whether the next step of the lane DECODE runs beside new work."""
        return self._decode_lane.is_beside

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
        self._refine.append(row)

    def abort_refinement(self, sequence_id: int) -> None:
        """Removes a queued mask. Without effect if a step has it, or if there is none."""
        self._refine = deque(row for row in self._refine if row.sequence_id != sequence_id)

    @property
    def is_refining(self) -> bool:
        """Whether masks are queued, or in a step that is out."""
        plans = (plan for out in self._out.values() for plan, _, _ in out)
        return bool(self._refine) or any(plan.refine for plan in plans)

    def expired(self, now: float) -> list[int]:
        """Sequences that wait and whose deadline has passed; the caller ends them."""
        return self._batch.expired(now)

    def take_admitted(self) -> list[Sequence]:
        """Sequences that were admitted for the first time since the last call."""
        return self._batch.take_admitted()

    def schedule(self, now: float = 0.0, lane: Lane = Lane.ALL) -> StepPlan | None:
        """The next step of a lane, or None if nothing can be computed now. commit() or fail_step() must follow, in the
        order of the lane, and for a step after the one that its ``after`` names."""
        self._batch.replace_running(now)
        turns = self._turns[lane]
        turns.begin(self._batch.running.values(), now, idle=not self._out[lane])
        plan = self._plan(now, lane)
        if plan is None and turns.alone and not self._out[lane]:
            # The favoured sequences have nothing to compute, and no step is out that could change that.
            turns.for_all()
            plan = self._plan(now, lane)
        return plan

    def _plan(self, now: float, lane: Lane) -> StepPlan | None:
        """The step for the sequences whose turn it is; None if it would be empty."""
        turns = self._turns[lane]
        draft = Draft(self._batch.images, self._limits.page_size)
        after: int | None = None
        if lane is not Lane.NEW_WORK:
            after = self._decode_rows(draft, lane)
        while (admitted := self._batch.admit(now)) is not None:
            # Beside decode rows that wait for a step, an admitted sequence would wait for it as well.
            if lane is not Lane.NEW_WORK and after is None and admitted.can_decode:
                if turns.has_turn(admitted):
                    draft.add_decode(admitted)
        images = self._batch.images
        # Images that are dropped from here on are used by this step.
        dropped = images.take_dropped() if lane is not Lane.DECODE else {}
        used = 0.0
        if lane is Lane.NEW_WORK or (
            lane is Lane.ALL and (turns.alone or not self._pacer.pauses(len(draft.decode)))
        ):
            used = self._schedule_new_work(draft, turns, now, lane)
        refine: list[RefineRow] = []
        # Decoding rows of the step wait for the masks.
        allowed = self._policy.budget.crops // CROPS_OF_A_MASK if draft.decode else MOST_REFINED
        most = 0 if lane is Lane.DECODE else min(MOST_REFINED, max(1, allowed))
        while self._refine and len(refine) < most:
            refine.append(self._refine.popleft())
        flushing = self._flushing and lane is not Lane.DECODE
        if draft.is_empty and not (refine or flushing):
            # Ended sequences and images to drop wait for the next step with rows. A step for them alone would delay the
            # next request and the delivery of the last one.
            images.give_back_dropped(dropped)
            return None
        load = Load(used)
        if lane is Lane.NEW_WORK:
            for item in draft.scheduled:
                item.sequence.steps_out.append(self._next_step_id)
            idle = [s.needs_prefill for s in self._batch.running.values() if not s.steps_out]
            load = Load(used, idle.count(False), self._batch.num_waiting + idle.count(True))
        is_spaced = lane is Lane.DECODE and after is None
        plan = StepPlan(
            step_id=self._next_step_id,
            drop_images=tuple(dropped),
            drop_crops=() if lane is Lane.DECODE else images.crops.take_dropped(),
            ended=self._batch.take_ended(),
            encode=tuple(draft.encode),
            reads=tuple(draft.reads),
            prefill=tuple(draft.prefill),
            decode=tuple(draft.decode),
            refine=tuple(refine),
            lane=lane,
            after=after,
            leave_room=lane is Lane.NEW_WORK and self._decode_lane.leaves_room(load),
            spacing_s=self._decode_lane.spacing_s if is_spaced else 0.0,
        )
        self._flushing = self._flushing and not flushing
        if plan.is_empty:
            return None
        self._next_step_id += 1
        self._out[lane].append((plan, draft.scheduled, turns.alone))
        if lane is Lane.NEW_WORK:
            self._decode_lane.launched_new_work(plan.step_id, load)
        elif lane is Lane.DECODE:
            self._decode_lane.launched(plan.after)
        turns.launched()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, StepToken]]:
        """Takes the result of the oldest step that is out. Returns the tokens of sequences that have not ended.
        Sequences whose row was not finite must have ended by discard().

        After that, a sequence whose ``rule`` is None and that has no token in flight waits for resume() or abort().
        Other sequences do not wait for it.
        """
        sampled: list[tuple[Sequence, StepToken]] = []
        if plan.lane is Lane.NEW_WORK:
            self._decode_lane.ended(plan.step_id, result.vision_s + result.prefill_s)
        self._batch.images.crops.came_back(plan.encode, failed=False)
        for item in self._pop_oldest(plan):
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
        if plan.lane is Lane.NEW_WORK:
            self._decode_lane.ended(plan.step_id, None)
        images = {piece.image.key for piece in plan.encode}
        self._batch.images.crops.came_back(plan.encode, failed=True)
        # Later steps that are out do not encode the rest of these images.
        for out in self._out.values():
            for later, _, _ in out:
                for piece in later.encode:
                    if piece.image.key in images:
                        self._batch.images.crops.forget(piece.kept_keys)
        involved = [item.sequence for item in self._pop_oldest(plan)]
        involved += [
            s for s in self._batch.running.values() if any(p.image.key in images for p in s.needed)
        ]
        # Later steps that are out may compute prefixes of images that this one should have encoded.
        involved += [
            item.sequence
            for out in self._out.values()
            for _, scheduled, _ in out
            for item in scheduled
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
        self._batch.flush()
        images = self._batch.images
        self._flushing = images.has_dropped or images.crops.has_dropped

    def check(self) -> None:
        """Raises AssertionError unless pages, tree, phases, shares and counts agree."""
        plans = [plan for out in self._out.values() for plan, _, _ in out]
        kept = [key for plan in plans for piece in plan.encode for key in piece.kept_keys]
        self._batch.images.crops.check(kept)
        self._batch.check()

    def _decode_rows(self, draft: Draft, lane: Lane) -> int | None:
        """Adds the rows of the running sequences. Returns the step of NEW_WORK that they continue, if any."""
        ready = [s for s in self._turns[lane].of(self._batch.running.values()) if s.can_decode]
        after = None
        if lane is Lane.DECODE:
            ready, after = self._decode_lane.choose(ready, self._batch.running.values())
        if self._batch.num_free_pages < len(ready):
            # Pages may run out: the sequences that would be preempted last get theirs first.
            ready.sort(key=preemption_rank)
        served: set[int] = set()
        for sequence in ready:
            if sequence.phase is Phase.RUNNING and self._batch.grow(sequence, served):
                draft.add_decode(sequence)
                served.add(sequence.sequence_id)
        return after if draft.decode else None

    def _schedule_new_work(self, draft: Draft, turns: Turns, now: float, lane: Lane) -> float:
        """Schedules images and prompts within the allowance. Returns the used share of it."""
        num_decode = len(draft.decode)
        # In a lane of its own, a large step delays no decoding. But its last image delays its first answer.
        bounded = lane is Lane.NEW_WORK or num_decode > 0
        allowance = Allowance(self._policy.budget, decoding=bounded)
        order = self._order.order(turns.of(self._batch.running.values()), now)
        for sequence in order:
            if allowance.is_spent:
                break
            before = allowance.work
            draft.add_new_work(sequence, allowance)
            work = allowance.work - before
            assert sequence.account is not None
            self._shares.charge(sequence.account, work)
        if not turns.alone and lane is Lane.ALL:
            waiting = self._batch.num_waiting + sum(
                1 for sequence in order if sequence.needs_prefill
            )
            self._pacer.took(allowance.used, num_decode, waiting)
        return allowance.used

    def _pop_oldest(self, plan: StepPlan) -> list[Scheduled]:
        oldest, scheduled, alone = self._out[plan.lane].popleft()
        self._turns[plan.lane].ended(alone=alone)
        assert oldest is plan, f"step {plan.step_id} came back before step {oldest.step_id}"
        if plan.lane is Lane.NEW_WORK:
            for item in scheduled:
                self._batch.step_came_back(item.sequence, plan.step_id)
        return scheduled
