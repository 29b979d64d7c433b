"""Scheduler: which sequences compute what in the next step.

Pure Python, ints in and ints out; it owns sequences, pages, the prefix cache and the image bookkeeping, and knows no
tensor, text, skill or clock. One thread uses it. Several steps may be out at a time; they run in the order scheduled,
or in two lanes (types.step.Lane).

Policy. All sequences that can decode do so in every step. Beside them a step takes new work within its allowance: text
in chunks, images crop by crop, the positions of an image whole. Waiting sequences join when a batch place and the pages
of their prompt are free; pages for sampled tokens are allocated when they are needed. When no page is free, cached
prefixes are evicted first. Then the youngest sequence of the least priority is preempted: it waits again and recomputes
its positions, those of sampled tokens included.

Principals share the batch (shares.py). A principal may fill it while no other has work, and gives places back when a
principal with less than its share waits (place_taker.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from ..types.info import SchedulerStats
from ..types.step import (
    MOST_REFINED,
    PREVIOUS,
    EmbedRead,
    EncodeSlice,
    Lane,
    RefineRow,
    Row,
    RuntimeLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    StepToken,
    TokenRule,
)
from ..types.submission import Submission
from .audit import check_holdings, check_phases
from .budget import Allowance, Pacer
from .memory.images import Images
from .memory.pages import PagePool
from .memory.prefix_cache import PrefixCache
from .memory.prompt_images import ImagePiece
from .order.decode_lane import DecodeLane
from .order.place_taker import PlaceTaker
from .order.prefill_order import PrefillOrder
from .order.turns import Turns
from .order.waiting import WaitingQueue
from .policy import SchedulerPolicy
from .prefixes_underway import PrefixesUnderway
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
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(self._pool)
        self._images = Images(self._policy.kept_embeddings, self._policy.kept_crops)
        self._shares = Shares(limits.max_batch_size)
        self._queue = WaitingQueue(self._policy.aging_s, self._shares)
        self._places = PlaceTaker(limits.max_batch_size, self._shares)
        two = limits.decodes_beside
        self._turns = {
            lane: Turns(self._shares)
            for lane in ((Lane.DECODE, Lane.NEW_WORK) if two else (Lane.ALL,))
        }
        self._order = PrefillOrder(self._policy, self._shares)
        self._running: dict[int, Sequence] = {}
        self._sequences: dict[int, Sequence] = {}
        self._underway = PrefixesUnderway(shared=self._policy.prefix_cache)
        self._out: dict[Lane, deque[tuple[StepPlan, list[Scheduled], bool]]]
        self._out = {lane: deque() for lane in self._turns}
        """Plans, their rows, and whether favoured sequences have them for themselves."""
        self._decode_lane = DecodeLane(self._policy.itl_target_s)
        self._leaving: dict[int, Sequence] = {}
        """Sequences that ended while a step of NEW_WORK writes to their pages. They keep pages and batch places."""
        self._ended: list[int] = []
        """Sequences that the next step names as ended."""
        self._flushing = False
        """Whether the next step is due even if it only drops images."""
        self._refine: deque[RefineRow] = deque()
        """Masks of sequences that have ended, in the order of their ends."""
        self._admitted: list[Sequence] = []
        self._next_step_id = 0
        self._pacer = Pacer(self._policy.budget)
        self._preemptions = self._cached_positions = self._prompt_positions = 0

    @property
    def has_work(self) -> bool:
        unfinished = self._sequences or self._refine or self._flushing
        return bool(unfinished or any(self._out.values()))

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._queue),
            pages_free=self._pool.num_free,
            pages_cached=self._cache.num_pages,
            pages_total=self._pool.num_pages,
            preemptions=self._preemptions,
            cached_positions=self._cached_positions,
            prompt_positions=self._prompt_positions,
        )

    def fits(self, num_prompt_positions: int, max_tokens: int) -> bool:
        """Whether a sequence of that size can ever run to its end; the last sampled token is never fed."""
        positions = num_prompt_positions + max_tokens - 1
        return (
            positions <= self._limits.max_seq_length
            and self._num_pages(positions) <= self._limits.num_pages
        )

    def add(self, submission: Submission) -> Sequence:
        """Queues a new sequence, which must be one that ``fits``, and returns it."""
        sequence = Sequence(submission, self._limits.page_size)
        assert sequence.sequence_id not in self._sequences
        assert self.fits(sequence.num_prompt_positions, submission.max_tokens), (
            "callers check fits() first"
        )
        sequence.account = self._shares.enter(submission.principal, submission.weight)
        self._sequences[sequence.sequence_id] = sequence
        self._queue.add(sequence)
        return sequence

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence in any phase, also while a step that computes it is out, and frees its pages. Its computed
        prefix stays in the prefix cache as long as there is room. Unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, keep=True)

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
        return self._queue.expired(now)

    def take_admitted(self) -> list[Sequence]:
        """Sequences that were admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def schedule(self, now: float = 0.0, lane: Lane = Lane.ALL) -> StepPlan | None:
        """The next step of a lane, or None if nothing can be computed now. commit() or fail_step() must follow, in the
        order of the lane, and for a step after the one that its ``after`` names."""
        self._replace_running(now)
        turns = self._turns[lane]
        turns.begin(self._running.values(), now, idle=not self._out[lane])
        plan = self._plan(now, lane)
        if plan is None and turns.alone and not self._out[lane]:
            # The favoured sequences have nothing to compute, and no step is out that could change that.
            turns.for_all()
            plan = self._plan(now, lane)
        return plan

    def _plan(self, now: float, lane: Lane) -> StepPlan | None:
        """The step for the sequences whose turn it is; None if it would be empty."""
        turns = self._turns[lane]
        scheduled: list[Scheduled] = []
        decode: list[Row] = []
        after: int | None = None
        if lane is not Lane.NEW_WORK:
            decode, after = self._decode_rows(scheduled, lane)
        while (admitted := self._admit(now)) is not None:
            # Beside decode rows that wait for a step, an admitted sequence would wait for it as well.
            if lane is not Lane.NEW_WORK and after is None and admitted.can_decode:
                if turns.has_turn(admitted):
                    decode.append(self._row(admitted, 1, scheduled, is_prefill=False))
        # Images that are dropped from here on are used by this step.
        dropped = self._images.take_dropped() if lane is not Lane.DECODE else {}
        encode: list[EncodeSlice] = []
        embed: list[EmbedRead] = []
        prefill: list[Row] = []
        used = 0.0
        if lane is Lane.NEW_WORK or (
            lane is Lane.ALL and (turns.alone or not self._pacer.pauses(len(decode)))
        ):
            used = self._schedule_new_work(
                turns, encode, embed, prefill, scheduled, now, num_decode=len(decode), lane=lane
            )
        refine: list[RefineRow] = []
        # Decoding rows of the step wait for the masks.
        allowed = self._policy.budget.crops // CROPS_OF_A_MASK if decode else MOST_REFINED
        most = 0 if lane is Lane.DECODE else min(MOST_REFINED, max(1, allowed))
        while self._refine and len(refine) < most:
            refine.append(self._refine.popleft())
        flushing = self._flushing and lane is not Lane.DECODE
        if not (encode or embed or prefill or decode or refine or flushing):
            # Ended sequences and images to drop wait for the next step with rows. A step for them alone would delay the
            # next request and the delivery of the last one.
            self._images.give_back_dropped(dropped)
            return None
        ended, self._ended = tuple(self._ended), []
        plan = StepPlan(
            step_id=self._next_step_id,
            drop_images=tuple(dropped),
            drop_crops=() if lane is Lane.DECODE else self._images.crops.take_dropped(),
            ended=ended,
            encode=tuple(encode),
            embed=tuple(embed),
            prefill=tuple(prefill),
            decode=tuple(decode),
            refine=tuple(refine),
            lane=lane,
            after=after,
        )
        self._flushing = self._flushing and not flushing
        if plan.is_empty:
            return None
        self._next_step_id += 1
        self._out[lane].append((plan, scheduled, turns.alone))
        if lane is Lane.NEW_WORK:
            for item in scheduled:
                item.sequence.steps_out.append(plan.step_id)
            decoding = sum(not s.needs_prefill and not s.steps_out for s in self._running.values())
            self._decode_lane.launched_new_work(plan.step_id, used, decoding)
        elif lane is Lane.DECODE:
            self._decode_lane.launched(plan.after)
        turns.launched()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, StepToken]]:
        """Takes the result of the oldest step that is out. Returns the tokens of sequences that have not ended.
        Sequences whose row was not finite must have ended by discard().

        After that, a sequence whose ``rule`` is None and that has no token in flight waits for resume() or abort().
        """
        sampled: list[tuple[Sequence, StepToken]] = []
        if plan.lane is Lane.NEW_WORK:
            self._decode_lane.ended(plan.step_id, result.vision_s + result.prefill_s)
        self._images.crops.came_back(plan.encode, failed=False)
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
                self._keep_prefix(sequence)
        return sampled

    def resume(self, sequence_id: int, rule: TokenRule) -> None:
        """Sets the rule of the next token, which may be before the tokens in flight have come back."""
        sequence = self._sequences[sequence_id]
        assert sequence.num_planned < sequence.submission.max_tokens, (
            f"sequence {sequence_id} is at its limit of tokens"
        )
        sequence.rule = rule

    def discard(self, sequence_id: int) -> None:
        """Ends a sequence whose row was not finite. The pages that it wrote leave the prefix cache, with all nodes
        below them. The embeddings from which it computed are dropped. Pages of other sequences stay."""
        sequence = self._sequences[sequence_id]
        shared = sequence.num_shared_pages
        if sequence.node is not None:
            self._cache.forget(sequence.node, set(sequence.pages[shared:]))
        for piece in sequence.images.pieces:
            if piece.start >= shared * self._limits.page_size and piece not in sequence.needed:
                self._images.spoil(piece.image.key)
                self._images.crops.forget(piece.image.crop_keys or ())
        self._end(sequence, keep=False)

    def fail_step(self, plan: StepPlan) -> list[int]:
        """Rolls back the oldest step that is out: ends the sequences it computed, or encoded crops for, and returns
        their ids.

        No state on the device is trusted after that: unused cached prefixes and all embeddings are dropped.
        """
        if plan.lane is Lane.NEW_WORK:
            self._decode_lane.ended(plan.step_id, None)
        images = {piece.image.key for piece in plan.encode}
        self._images.crops.came_back(plan.encode, failed=True)
        # Later steps that are out do not encode the rest of these images.
        for out in self._out.values():
            for later, _, _ in out:
                for piece in later.encode:
                    if piece.image.key in images:
                        self._images.crops.forget(piece.kept_keys)
        involved = [item.sequence for item in self._pop_oldest(plan)]
        involved += [
            s for s in self._running.values() if any(p.image.key in images for p in s.needed)
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
                self._end(sequence, keep=False)
        self._cache.flush()
        self._images.reset()
        return failed

    def flush(self) -> None:
        """Drops cached prefixes and embeddings without users. The next step drops them in the runtime."""
        self._cache.flush()
        self._images.flush()
        self._flushing = self._images.has_dropped or self._images.crops.has_dropped

    def check(self) -> None:
        """Raises AssertionError unless pages, tree, phases, shares and counts agree."""
        self._pool.check()
        self._cache.check()
        self._images.check()
        plans = [plan for out in self._out.values() for plan, _, _ in out]
        self._images.crops.check([k for p in plans for piece in p.encode for k in piece.kept_keys])
        self._shares.check()
        self._underway.check(self._running.keys() | self._leaving.keys())
        assert len(self._running) + len(self._leaving) <= self._limits.max_batch_size
        check_phases(self._sequences, self._running, [s.sequence_id for s in self._queue])
        size = self._limits.page_size
        holders = [*self._sequences.values(), *self._leaving.values()]
        check_holdings(holders, size, self._pool, self._cache, self._images)

    def _num_pages(self, positions: int) -> int:
        return -(-positions // self._limits.page_size)

    def _decode_rows(self, scheduled: list[Scheduled], lane: Lane) -> tuple[list[Row], int | None]:
        """The rows of a step, and the step of NEW_WORK that they continue, if any."""
        ready = [s for s in self._turns[lane].of(self._running.values()) if s.can_decode]
        after = None
        if lane is Lane.DECODE:
            ready, after = self._decode_lane.choose(ready, self._running.values())
        if self._pool.num_free < len(ready):
            # Pages may run out: the sequences that would be preempted last get theirs first.
            ready.sort(key=_preemption_rank)
        rows = []
        served: set[int] = set()
        for sequence in ready:
            if sequence.phase is Phase.RUNNING and self._grow(sequence, served):
                rows.append(self._row(sequence, 1, scheduled, is_prefill=False))
                served.add(sequence.sequence_id)
        return rows, after if rows else None

    def _grow(self, sequence: Sequence, served: set[int]) -> bool:
        """Makes room for one more position, by preemption if necessary. False if ``sequence`` itself was preempted, or
        if no sequence can be until a step has come back."""
        if sequence.num_scheduled < len(sequence.pages) * self._limits.page_size:
            return True
        while True:
            pages = self._allocate(1)
            if pages is not None:
                sequence.pages += pages
                return True
            # A sequence with a row in this step keeps its pages: two rows must not write to one page.
            running = self._running.items()
            candidates = [s for i, s in running if i not in served and not s.steps_out]
            if not candidates:
                return False
            victim = max(candidates, key=_preemption_rank)
            self._preempt(victim)
            if victim is sequence:
                return False

    def _allocate(self, count: int) -> list[int] | None:
        missing = count - self._pool.num_free
        if missing > 0 and self._cache.evict(missing) < missing:
            return None
        return self._pool.allocate(count)

    def _preempt(self, sequence: Sequence) -> None:
        """Releases all that a running sequence holds. It keeps its sampled tokens, to compute their positions again."""
        self._preemptions += 1
        self._keep_prefix(sequence)
        self._give_back(sequence)
        sequence.move(Phase.WAITING)
        sequence.cursor = sequence.num_scheduled = sequence.num_committed = 0
        sequence.epoch += 1
        self._queue.add_first(sequence)

    def _schedule_new_work(
        self,
        turns: Turns,
        encode: list[EncodeSlice],
        embed: list[EmbedRead],
        prefill: list[Row],
        scheduled: list[Scheduled],
        now: float,
        *,
        num_decode: int,
        lane: Lane,
    ) -> float:
        """Schedules images and prompts within the allowance. Returns the used share of it."""
        # In a lane of its own, a large step delays no decoding. But its last image delays its first answer.
        bounded = lane is Lane.NEW_WORK or num_decode > 0
        allowance = Allowance(self._policy.budget, decoding=bounded)
        order = self._order.order(turns.of(self._running.values()), now)
        for sequence in order:
            if allowance.is_spent:
                break
            before = allowance.work
            if sequence.submission.embedding is not None:
                self._embed(sequence, allowance, encode, embed, scheduled)
            else:
                self._prefill(sequence, allowance, encode, prefill, scheduled)
            work = allowance.work - before
            assert sequence.account is not None
            self._shares.charge(sequence.account, work)
        if not turns.alone and lane is Lane.ALL:
            waiting = len(self._queue) + sum(1 for sequence in order if sequence.needs_prefill)
            self._pacer.took(allowance.used, num_decode, waiting)
        return allowance.used

    def _embed(
        self,
        sequence: Sequence,
        allowance: Allowance,
        encode: list[EncodeSlice],
        embed: list[EmbedRead],
        scheduled: list[Scheduled],
    ) -> None:
        """Schedules crops of an image as the allowance permits, and the embeddings to return after the last one."""
        (piece,), spec = sequence.needed, sequence.submission.embedding
        assert spec is not None
        image = piece.image
        if not self._encode(sequence, piece, allowance, encode):
            return
        allowance.take_crops(1)  # Embeddings that are there cost little, but not nothing.
        self._images.release(image.key)
        sequence.needed = []
        embed.append(EmbedRead(sequence.sequence_id, image, spec))
        scheduled.append(
            Scheduled(
                sequence, sequence.epoch, 0, samples=False, is_prefill=False, images=(image.key,)
            )
        )

    def _prefill(
        self,
        sequence: Sequence,
        allowance: Allowance,
        encode: list[EncodeSlice],
        prefill: list[Row],
        scheduled: list[Scheduled],
    ) -> None:
        """Schedules as much of a prompt as the allowance permits: text in parts, each image as a whole."""
        count = 0
        computed: list[ImagePiece] = []
        while (begin := sequence.cursor + count) < len(sequence.tokens):
            piece = sequence.needed[0] if sequence.needed else None
            if piece is not None and piece.first == begin:
                if not self._encode(sequence, piece, allowance, encode):
                    break
                if not allowance.allows_whole(piece.num_positions):
                    break
                allowance.take_positions(piece.num_positions)
                self._images.release(piece.image.key)
                computed.append(sequence.needed.pop(0))
                count += piece.last - piece.first
                continue
            end = len(sequence.tokens) if piece is None else piece.first
            text = min(end - begin, allowance.positions)
            allowance.take_positions(text)
            count += text
            if text < end - begin:
                break
        if count:
            prefill.append(self._row(sequence, count, scheduled, tuple(computed), is_prefill=True))

    def _encode(
        self,
        sequence: Sequence,
        piece: ImagePiece,
        allowance: Allowance,
        encode: list[EncodeSlice],
    ) -> bool:
        """Schedules crops of an image; True once all are."""
        key = piece.image.key
        while not self._images.is_encoded(key) and allowance.crops:
            part = self._images.encode(key, allowance.crops)
            allowance.take_crops(part.last - part.first - len(part.reused))
            sequence.num_encoded_crops += part.num_encoded
            sequence.num_reused_crops += len(part.reused)
            encode.append(part)
        return self._images.is_encoded(key)

    def _admit(self, now: float) -> Sequence | None:
        """Admits the next waiting sequence if it has room. No sequence overtakes it, unless it waits for an image
        prefix that another sequence computes."""
        if self._is_full:
            return None
        sequence = self._next(now)
        if sequence is None or not self._take_pages(sequence, now):
            return None
        self._join(sequence, now)
        return sequence

    def _replace_running(self, now: float) -> None:
        """If the batch is full, lets the next waiting sequence replace a running one that has a weaker claim."""
        if not self._is_full or not self._places.next_step():
            return
        if self._shares.num_principals == 1 and not self._queue.has_best_priority:
            return
        sequence = self._next(now)
        victim = sequence and self._places.victim(sequence, self._running.values())
        if sequence is None or victim is None or not self._take_pages(sequence, now):
            return
        self._preempt(victim)
        self._places.took()
        self._join(sequence, now)

    @property
    def _is_full(self) -> bool:
        return len(self._running) + len(self._leaving) == self._limits.max_batch_size

    def _next(self, now: float) -> Sequence | None:
        """The next waiting sequence, after parking those that wait for an image prefix; None if there is none."""
        while (sequence := self._queue.head(now)) is not None and not sequence.in_flight:
            prefix = self._awaited_prefix(sequence)
            if prefix is None:
                return sequence
            self._queue.park(sequence, prefix)
        return None

    def _join(self, sequence: Sequence, now: float) -> None:
        """Moves a waiting sequence that has its pages into the batch."""
        self._queue.take(sequence, now)
        sequence.move(Phase.RUNNING)
        self._running[sequence.sequence_id] = sequence
        assert sequence.account is not None
        sequence.account.num_running += 1
        sequence.account.num_urgent += sequence.priority == 0
        sequence.needed = [p for p in sequence.images.pieces if p.first >= sequence.cursor]
        for piece in sequence.needed:
            self._images.acquire(piece.image)
        if sequence.needed:
            self._underway.begin(sequence)

    def _awaited_prefix(self, sequence: Sequence) -> Hashable | None:
        """The prefix of ``sequence`` that another sequence is computing; None if it can begin."""
        namespace = sequence.submission.namespace
        for run in sequence.images.runs:
            if run.prefix in self._underway and not self._cache.contains(
                namespace, sequence.atoms(run.end)
            ):
                return run.prefix
        return None

    def _take_pages(self, sequence: Sequence, now: float) -> bool:
        """Reserves the pages of all tokens so far and shares cached ones. False, without effect, if too few are free.

        One page for each running sequence stays free, so that an admission does not preempt at once.
        """
        size = self._limits.page_size
        total = sequence.num_positions
        # At least one position is computed, or there would be nothing to sample from.
        atoms = sequence.atoms((total - 1) // size) if self._policy.prefix_cache else []
        match = self._cache.match(sequence.submission.namespace, atoms)
        needed = self._num_pages(total) - len(match.pages)
        if needed + len(self._running) > self._pool.num_free + self._cache.num_evictable:
            if match.node is not None:
                self._cache.unlock(match.node)
            return False
        self._pool.share(match.pages)
        fresh = self._allocate(needed)
        assert fresh is not None, "evictable pages were counted wrongly"
        sequence.node = match.node
        sequence.replace_pages(match.pages + fresh)
        sequence.num_shared_pages = len(match.pages)
        sequence.num_scheduled = sequence.num_committed = len(match.pages) * size
        sequence.cursor = sequence.images.num_tokens(sequence.num_scheduled)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            self._admitted.append(sequence)
            sequence.num_cached = sequence.num_scheduled
            self._cached_positions += sequence.num_scheduled
            self._prompt_positions += total
        return True

    def _row(
        self,
        sequence: Sequence,
        count: int,
        scheduled: list[Scheduled],
        images: tuple[ImagePiece, ...] = (),
        *,
        is_prefill: bool,
    ) -> Row:
        """Schedules the next ``count`` tokens, with ``images`` among them; samples if they are the last ones."""
        start = sequence.num_scheduled
        tokens = tuple(sequence.tokens[sequence.cursor : sequence.cursor + count])
        sequence.cursor += count
        if not is_prefill:
            account = sequence.account
            assert account is not None
            account.used += account.token_cost
        sequence.num_scheduled += count
        for piece in images:
            sequence.num_scheduled += piece.num_hidden
        sample: SampleSpec | None = None
        if sequence.cursor == len(sequence.tokens):
            assert sequence.rule is not None and not (is_prefill and sequence.in_flight)
            sampling = sequence.submission.sampling
            sample = SampleSpec(sequence.rule, sampling, draw=sequence.num_planned)
            sequence.rule = None
            sequence.in_flight += 1
            sequence.tokens.append(PREVIOUS)
        end = sequence.num_scheduled
        keys = tuple([piece.image.key for piece in images]) if images else ()
        scheduled.append(
            Scheduled(sequence, sequence.epoch, end, sample is not None, is_prefill, keys)
        )
        page_table = sequence.page_table(-(-end // self._limits.page_size))
        adapter = sequence.submission.adapter
        return Row(sequence.sequence_id, tokens, start, page_table, sample, adapter)

    def _pop_oldest(self, plan: StepPlan) -> list[Scheduled]:
        oldest, scheduled, alone = self._out[plan.lane].popleft()
        self._turns[plan.lane].ended(alone=alone)
        assert oldest is plan, f"step {plan.step_id} came back before step {oldest.step_id}"
        if plan.lane is Lane.NEW_WORK:
            for item in scheduled:
                sequence = item.sequence
                sequence.steps_out.remove(plan.step_id)
                if sequence.sequence_id in self._leaving and not sequence.steps_out:
                    del self._leaving[sequence.sequence_id]
                    self._free(sequence)
                    self._ended.append(sequence.sequence_id)
        return scheduled

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Adds the whole pages of committed positions to the prefix cache, unless the sequence shares pages that have
        left it: these may hold numbers that are not finite, and other sequences may hold them, too."""
        if sequence.node is not None and sequence.node.is_forgotten:
            self._release_waiting(sequence)
            return
        if self._policy.prefix_cache and sequence.num_committed:
            size = self._limits.page_size
            count = sequence.num_committed // size
            atoms = sequence.atoms(count)
            num_pages = sum(atom.num_pages for atom in atoms)
            namespace = sequence.submission.namespace
            node = self._cache.insert(namespace, atoms, sequence.pages[:num_pages])
            if sequence.node is not None:
                self._cache.unlock(sequence.node)
            sequence.node = node
            self._release_waiting(sequence, count)

    def _release_waiting(self, sequence: Sequence, num_pages: int | None = None) -> None:
        """Releases the sequences that wait for prefixes of ``sequence``: its first ``num_pages`` pages are cached, or
        its computation has ended."""
        for prefix in self._underway.end(sequence, num_pages):
            self._queue.release(prefix)

    def _give_back(self, sequence: Sequence) -> None:
        """Frees batch place, pages, lock and image of a running sequence."""
        self._leave_batch(sequence)
        self._free(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence_id]
        assert sequence.account is not None
        sequence.account.num_running -= 1
        sequence.account.num_urgent -= sequence.priority == 0

    def _free(self, sequence: Sequence) -> None:
        """Frees pages, lock and image of a sequence that has left the batch."""
        self._pool.release(sequence.pages)
        sequence.replace_pages([])
        if sequence.node is not None:
            self._cache.unlock(sequence.node)
            sequence.node = None
        for piece in sequence.needed:
            self._images.release(piece.image.key)
        sequence.needed = []
        self._release_waiting(sequence)

    def _end(self, sequence: Sequence, *, keep: bool) -> None:
        is_written = bool(sequence.steps_out)
        if sequence.phase is Phase.RUNNING:
            if keep:
                self._keep_prefix(sequence)
            self._leave_batch(sequence)
            if is_written:
                self._leaving[sequence.sequence_id] = sequence
            else:
                self._free(sequence)
        else:
            self._queue.remove(sequence.sequence_id)
        sequence.move(Phase.FINISHED)
        assert sequence.account is not None
        self._shares.leave(sequence.account)
        del self._sequences[sequence.sequence_id]
        if not is_written:
            self._ended.append(sequence.sequence_id)


def _preemption_rank(sequence: Sequence) -> tuple[int, float, int]:
    """The running sequence with the greatest rank is preempted first."""
    return sequence.priority, sequence.submission.arrived_at, sequence.sequence_id
