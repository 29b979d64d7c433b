"""FakeRuntime: a scripted runtime without torch, for tests of the scheduler, the loop and the service.

It records the token in every KV slot, and samples with a hash of all tokens of a sequence, which it reads from the
sequence's pages. So a result depends only on the sequence's own tokens. A page that is reused too early, shared by
mistake or never computed changes the sampled token. Steps run when they are collected, in the order of their launch.
With two lanes, a step of NEW_WORK therefore runs as late as it may: after decode steps that were launched later and
collected earlier.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import chain, groupby, islice
from typing import cast

import numpy as np

from kestrel_engine import clock
from kestrel_engine.runtime.lost_work import LostWork
from kestrel_engine.types.embedding import Embedding, EmbeddingSpec
from kestrel_engine.types.requests import Coord, ImageBlock, Size, Token, num_positions
from kestrel_engine.types.step import (
    PREVIOUS,
    ImageRead,
    Lane,
    Row,
    RuntimeLimits,
    StepPlan,
    StepResult,
    StepToken,
    TokenRule,
)

NOT_FINITE = ImageBlock("not finite", 1)
"""Marks a slot whose keys and values are not finite."""

Script = Callable[[tuple[Token, ...]], int]
"""Returns the id that the model prefers next, given the tokens at all positions of a sequence."""


def hashed(fed: tuple[Token, ...], vocab_size: int = 1000) -> int:
    """Returns a deterministic id above 20, a hash of the tokens ``fed``."""
    # An image has the same token at all its positions.
    runs = [(token, len(list(run))) for token, run in groupby(fed)]
    digest = blake2b(repr(runs).encode(), digest_size=8).digest()
    return 21 + int.from_bytes(digest) % (vocab_size - 21)


class FakeRuntime:
    """Implements ``protocol.Runtime``. ``cost`` returns the seconds that a step takes."""

    def __init__(
        self,
        limits: RuntimeLimits,
        script: Script | None = None,
        *,
        cost: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self._limits = limits
        self._script = script or (lambda fed: hashed(fed, limits.vocab_size))
        self._cost = cost
        self._pages: dict[int, list[Token | None]] = {}
        """The tokens in the slots of each page that was written; None in slots that were not."""
        self._adapters: dict[int, str | None] = {}
        """The key of the adapter with which each page was written."""
        self._crops: dict[str, int] = {}
        self._sampled: dict[int, StepToken] = {}
        self.launched: dict[Lane, deque[StepPlan]] = {lane: deque() for lane in Lane}
        self._results: dict[int, StepResult] = {}
        """Results of steps that have run and are not collected, by step id."""
        self._lost = LostWork()
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.fail_launch: Exception | None = None
        self._kept_crops: set[str] = set()
        self._spoiled: set[str] = set()
        self._writes_bad = False
        self.bad_sequences: set[int] = set()
        """Sequences that write values that are not finite from now on."""
        self.bad_images: set[str] = set()
        """Keys of images whose next embedding is not finite."""
        self.closed = False

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> StepPlan:
        assert not self.closed
        if self.fail_launch is not None:
            error, self.fail_launch = self.fail_launch, None
            raise error
        beside = self._limits.decodes_beside
        assert plan.lane in ((Lane.DECODE, Lane.NEW_WORK) if beside else (Lane.ALL,)), plan.lane
        self.launched[plan.lane].append(plan)
        return plan

    def is_done(self, handle: StepPlan) -> bool:
        """Nothing runs by itself. A step of NEW_WORK counts as done once no decode step is out."""
        return not self.launched[Lane.DECODE]

    def collect(self, handle: StepPlan) -> StepResult:
        if handle.lane is Lane.NEW_WORK:
            # It begins after the decode steps that were launched before it.
            for plan in self.launched[Lane.DECODE]:
                if plan.step_id < handle.step_id and plan.step_id not in self._results:
                    self._results[plan.step_id] = self._run(plan)
        assert self.launched[handle.lane].popleft() is handle, "steps are collected as launched"
        assert all(plan.step_id != handle.after for plan in self.launched[Lane.NEW_WORK]), (
            f"step {handle.step_id} is collected before step {handle.after}"
        )
        self.plans.append(handle)
        if self._cost is not None:
            clock.sleep(self._cost(handle))
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            self._lost.note(handle)
            self._results.pop(handle.step_id, None)
            raise error
        result = self._results.pop(handle.step_id, None)
        return self._run(handle) if result is None else result

    def _run(self, plan: StepPlan) -> StepResult:
        result = self.execute(self._lost.without(plan))
        self._lost.note_sequences(result.non_finite)
        return result

    def close(self) -> None:
        self.closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        for key in plan.drop_images:
            self._crops.pop(key, None)
            self._spoiled.discard(key)
        for sequence_id in plan.ended:
            self._sampled.pop(sequence_id, None)
        self._kept_crops -= set(plan.drop_crops)
        for piece in plan.encode:
            keys = piece.image.crop_keys or ()
            assert {keys[index] for index in piece.reused} <= self._kept_crops, (
                f"crops that are not kept: {piece}"
            )
        for piece in plan.encode:
            self._kept_crops |= set(piece.kept_keys)
            if piece.first == 0:
                self._spoiled.discard(piece.image.key)
            done = self._crops.get(piece.image.key, 0) if piece.first else 0
            assert piece.first == done < piece.last <= piece.image.num_crops, (
                f"crops out of order: {piece}"
            )
            self._crops[piece.image.key] = piece.last
            if piece.last == piece.image.num_crops:
                self._crops[piece.image.key] = 10**9
                if piece.image.key in self.bad_images:
                    self.bad_images.discard(piece.image.key)
                    self._spoiled.add(piece.image.key)
        bad = {read.sequence_id for read in plan.reads if read.image.key in self._spoiled}
        readings = {
            read.sequence_id: self._reading(read)
            for read in plan.reads
            if read.sequence_id not in bad
        }
        rows = (*plan.prefill, *plan.decode)
        self._check_writers(rows)
        tokens: dict[int, StepToken] = {}
        for row in rows:
            self._write(row)
        for row in rows:
            if self._writes_bad and NOT_FINITE in self._fed(row):
                bad.add(row.sequence_id)
            elif row.sample is not None:
                tokens[row.sequence_id] = self._sampled[row.sequence_id] = self.sample(row)
        # A refined mask is the coarse one less its first row, so that tests can tell them apart.
        refined = {row.sequence_id: _without_first_row(row.mask) for row in plan.refine}
        return StepResult(
            tokens=tokens, readings=readings, non_finite=frozenset(bad), refined=refined
        )

    def _reading(self, read: ImageRead) -> Embedding:
        """Two numbers a vector that depend on the image's key and the crop only."""
        image, spec = read.image, read.spec
        assert isinstance(spec, EmbeddingSpec)
        assert self._crops.get(image.key) == 10**9, f"image {image.key} was not encoded"
        assert not spec.crops or image.keeps_features, f"the features of {image.key} were dropped"
        dtype = np.float16 if spec.half else np.float32
        count = 1 if image.tiling == (1, 1) else image.num_crops
        content = image.key.partition("/")[0]
        vectors = [
            np.full((2, 2) if spec.patches else 2, hashed((ImageBlock(content, i),)), dtype)
            for i in range(count + 1)
        ]
        return Embedding(
            vectors[0] if spec.image else None, np.stack(vectors[1:]) if spec.crops else None
        )

    def _check_writers(self, rows: tuple[Row, ...]) -> None:
        """Checks that no row reads or writes a page that another row of the step writes."""
        size = self._limits.page_size
        writers: dict[int, int] = {}
        for row in rows:
            for page in row.page_table[row.start // size :]:
                assert 0 <= page < self._limits.num_pages, f"page {page} does not exist"
                assert page not in writers, f"page {page} has two writers"
                writers[page] = row.sequence_id
        for row in rows:
            for page in row.page_table:
                assert writers.get(page, row.sequence_id) == row.sequence_id, (
                    f"page {page} is read while written"
                )

    def _write(self, row: Row) -> None:
        position, size = row.start, self._limits.page_size
        for each in row.tokens:
            token = self._sampled[row.sequence_id].as_input() if each is PREVIOUS else each
            if isinstance(token, ImageBlock):
                assert self._crops.get(token.key) == 10**9, f"image {token.key} was not encoded"
            is_bad = row.sequence_id in self.bad_sequences or (
                isinstance(token, ImageBlock) and token.key in self._spoiled
            )
            self._writes_bad |= is_bad
            for _ in range(num_positions((token,))):
                page = row.page_table[position // size]
                self._adapters[page] = None if row.adapter is None else row.adapter.key
                if page not in self._pages:
                    self._pages[page] = [None] * size
                self._pages[page][position % size] = NOT_FINITE if is_bad else token
                position += 1
        assert position <= len(row.page_table) * size, "the page table is too short"

    def _fed(self, row: Row) -> tuple[Token, ...]:
        """Returns the tokens in the pages of the row's sequence, up to the end of the row."""
        length = row.start + sum(
            t.num_positions if isinstance(t, ImageBlock) else 1 for t in row.tokens
        )
        table = row.page_table[: -(-length // self._limits.page_size)]
        fed = list(chain.from_iterable(self._pages[page] for page in table))[:length]
        key = None if row.adapter is None else row.adapter.key
        assert all(self._adapters[page] == key for page in table), (
            f"sequence {row.sequence_id} reads a page of another adapter"
        )
        assert None not in fed, f"sequence {row.sequence_id} reads a slot that was never written"
        return cast(tuple[Token, ...], tuple(fed))

    def sample(self, row: Row) -> StepToken:
        assert row.sample is not None
        rule, fed = row.sample.rule, self._fed(row)
        wanted = self._script(fed)
        if rule.forced is not None:
            wanted = rule.forced
        elif rule.allowed is not None and wanted not in rule.allowed:
            wanted = rule.allowed[hashed(fed) % len(rule.allowed)]
        elif rule.mask is not None:
            permitted = [
                8 * at + bit
                for at, byte in enumerate(rule.mask)
                if byte
                for bit in range(8)
                if byte >> bit & 1
            ]
            wanted = wanted if wanted in permitted else permitted[hashed(fed) % len(permitted)]
        elif wanted in rule.suppressed:
            wanted = hashed(fed, self._limits.vocab_size)
        if rule.forced is None and rule.otherwise is not None and wanted != rule.stop:
            wanted = rule.otherwise
        value: Coord | Size | None = None
        if wanted == 5 and rule.read_coord:
            value = Coord(hashed(fed) % 1000 / 1000)
        elif wanted == 6 and rule.read_size:
            value = Size(hashed(fed) % 1000 / 1000, hashed(fed) % 500 / 1000)
        # Any numbers that depend on the sequence alone and that float32 holds exactly.
        logprob = 0.0 if rule.forced is not None else -((37 * len(fed) + wanted) % 1024) / 1024
        near = None if value is None else (hashed(fed) % 256 + 1) / 256
        top: list[tuple[int, float]] = []
        if rule.forced is None:
            places = range(self._limits.vocab_size)
            near_ids = ((wanted + place) % self._limits.vocab_size for place in places)
            permitted_ids = (token for token in near_ids if _permits(rule, token))
            top = [
                (token, logprob - place / 16)
                for place, token in enumerate(islice(permitted_ids, rule.top))
            ]
        return StepToken(wanted, value, logprob, near, tuple(top))


def _permits(rule: TokenRule, token: int) -> bool:
    if rule.mask is not None:
        return bool(rule.mask[token // 8] >> token % 8 & 1)
    return token not in rule.suppressed and (rule.allowed is None or token in rule.allowed)


def _without_first_row(mask: np.ndarray) -> np.ndarray:
    """Returns a mask as float32 without the first row that has anything inside."""
    refined = mask.astype("float32")
    refined[int(refined.any(axis=1).argmax())] = 0
    return refined
