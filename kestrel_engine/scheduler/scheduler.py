"""Scheduler: which sequences compute what in the next step.

Pure Python, ints in and ints out; it owns sequences and pages and knows no tensor, text or skill. One thread uses it.
Policy: everybody who decodes decodes in every step; those who wait join in order of arrival as soon as a batch place
and all the pages that they can ever need are free, within a budget of prompt positions and crops a step. Reserving the
worst case means that nobody who started is ever preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..requests import Token, num_positions
from ..step import Row, RuntimeLimits, SampleSpec, StepPlan, StepResult, StepToken, TokenRule
from .pages import PagePool
from .sequence import Phase, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """Bounds on the new work of one step, so that running requests are not held up for long. The first request of a
    step is always let in, however large."""

    prefill_positions: int = 2048
    crops: int = 28


class Scheduler:
    """add / abort / schedule / commit / resume / finish; every sequence ends by finish, abort or fail_step."""

    def __init__(self, limits: RuntimeLimits, budget: StepBudget | None = None) -> None:
        self._limits = limits
        self._budget = budget or StepBudget()
        self._pool = PagePool(limits.num_pages)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._image_users: dict[str, int] = {}
        """Keys of encoded pictures held by the runtime, with the number of prefills that still need them."""
        self._drops: list[str] = []
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._drops)

    def fits(self, num_prompt_positions: int, max_tokens: int) -> bool:
        """Whether a sequence of that size can ever be admitted."""
        positions = num_prompt_positions + max_tokens - 1
        return (
            positions <= self._limits.max_seq_length
            and self._num_pages(positions) <= self._limits.num_pages
        )

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence that ``fits``."""
        assert sequence.phase is Phase.WAITING and sequence.sequence_id not in self._running
        assert self.fits(sequence.num_prompt_positions, sequence.max_tokens), (
            "callers check fits() first"
        )
        self._waiting.append(sequence)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence in any phase between steps and frees what it held; unknown ids are ignored."""
        if sequence_id in self._running:
            self.finish(sequence_id)
            return
        for sequence in self._waiting:
            if sequence.sequence_id == sequence_id:
                self._waiting.remove(sequence)
                sequence.move(Phase.FINISHED)
                return

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Admits; commit() or fail_step() must follow."""
        decode = tuple(
            self._decode_row(s) for s in self._running.values() if s.phase is Phase.DECODE
        )
        admitted = self._admit()
        prefill = tuple(self._prefill_row(s) for s in admitted)
        encode = {}
        for sequence in admitted:
            image = sequence.image
            if image is None:
                continue
            if self._image_users.get(image.key, 0) == 0:
                encode[image.key] = image
            self._image_users[image.key] = self._image_users.get(image.key, 0) + 1
        # An image prefix is prefilled whole in this step, so every picture encoded here can go at its end.
        for sequence in admitted:
            if sequence.image is not None:
                self._drop_image_user(sequence.image.key)
        plan = StepPlan(
            step_id=self._next_step_id,
            encode=tuple(encode.values()),
            prefill=prefill,
            decode=decode,
            drop_images=tuple(self._drops),
        )
        self._drops = []
        if plan.is_empty:
            return None
        self._next_step_id += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, StepToken]]:
        """Takes a step's result; the sequences returned are paused until resume() or finish()."""
        sampled: list[tuple[Sequence, StepToken]] = []
        for row in (*plan.prefill, *plan.decode):
            sequence = self._running.get(row.sequence_id)
            if sequence is None:  # Aborted while the step ran.
                continue
            sequence.num_computed = row.start + num_positions(row.tokens)
            if row.sample is not None:
                token = result.tokens[row.sequence_id]
                sequence.take(token)
                sampled.append((sequence, token))
        return sampled

    def resume(self, sequence_id: int, rule: TokenRule) -> None:
        """Lets a paused sequence decode its next token under ``rule``."""
        sequence = self._running[sequence_id]
        assert sequence.num_sampled < sequence.max_tokens, (
            f"sequence {sequence_id} is at its limit of tokens"
        )
        sequence.rule = rule
        sequence.move(Phase.DECODE)

    def finish(self, sequence_id: int) -> None:
        """Ends a running sequence and frees its pages and batch place."""
        sequence = self._running.pop(sequence_id)
        sequence.move(Phase.FINISHED)
        self._pool.release(sequence.pages)
        sequence.pages = []

    def fail_step(self, plan: StepPlan) -> list[int]:
        """Rolls back a step that raised: ends the sequences it held and returns their ids; the rest go on."""
        failed = [
            row.sequence_id
            for row in (*plan.prefill, *plan.decode)
            if row.sequence_id in self._running
        ]
        for sequence_id in failed:
            self.finish(sequence_id)
        # The runtime may or may not have kept the pictures; dropping an unknown key is harmless.
        self._drops += [key for key in plan.drop_images if self._image_users.get(key, 0) == 0]
        return failed

    def check(self) -> None:
        """Raises AssertionError unless pages, phases and counts agree."""
        self._pool.check()
        held = [page for s in self._running.values() for page in s.pages]
        assert len(held) == self._pool.num_pages - self._pool.num_free, (
            "pages lost or shared by mistake"
        )
        assert len(self._running) <= self._limits.max_batch_size
        assert all(s.phase is Phase.WAITING and not s.pages for s in self._waiting)
        assert all(s.phase not in (Phase.WAITING, Phase.FINISHED) for s in self._running.values())

    def _num_pages(self, positions: int) -> int:
        return -(-positions // self._limits.page_size)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        positions = crops = 0
        while self._waiting and len(self._running) < self._limits.max_batch_size:
            sequence = self._waiting[0]
            pages = self._num_pages(sequence.num_reserved_positions)
            positions += sequence.num_prompt_positions
            crops += 0 if sequence.image is None else sequence.image.num_crops
            over = positions > self._budget.prefill_positions or crops > self._budget.crops
            if pages > self._pool.num_free or (admitted and over):
                break
            self._waiting.popleft()
            sequence.pages = self._pool.allocate(pages)
            sequence.move(Phase.PREFILL)
            self._running[sequence.sequence_id] = sequence
            admitted.append(sequence)
        return admitted

    def _drop_image_user(self, key: str) -> None:
        self._image_users[key] -= 1
        if self._image_users[key] == 0:
            del self._image_users[key]
            self._drops.append(key)

    def _prefill_row(self, sequence: Sequence) -> Row:
        return self._row(sequence, sequence.prompt, sequence.num_prompt_positions)

    def _decode_row(self, sequence: Sequence) -> Row:
        assert sequence.next_input is not None
        return self._row(sequence, (sequence.next_input,), 1)

    def _row(self, sequence: Sequence, tokens: tuple[Token, ...], num_new: int) -> Row:
        pages = self._num_pages(sequence.num_computed + num_new)
        return Row(
            sequence_id=sequence.sequence_id,
            tokens=tokens,
            start=sequence.num_computed,
            page_table=tuple(sequence.pages[:pages]),
            sample=SampleSpec(
                rule=sequence.rule, sampling=sequence.sampling, draw=sequence.num_sampled
            ),
        )
