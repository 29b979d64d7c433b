"""Drives a scheduler against the fake runtime as the loop does, several steps out, checking after every move.

The fake runtime remembers which slots hold numbers that are not finite: who reads one comes back as not finite."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.scheduler.scheduler import Scheduler
from kestrel_engine.scheduler.sequence import Sequence
from kestrel_engine.types.embedding import EmbeddingSpec
from kestrel_engine.types.requests import ImageBlock, PreparedImage, SamplingParams, Token
from kestrel_engine.types.step import Lane, RuntimeLimits, StepPlan, TokenRule
from kestrel_engine.types.submission import Submission
from tests.fake_runtime import FakeRuntime

LIMITS = RuntimeLimits(
    num_pages=40, page_size=5, max_batch_size=3, max_seq_length=60, vocab_size=1000
)
IMAGE_POSITIONS = 9
"""With the BOS two pages of 5."""
CROPS = {"a": 2, "b": 4, "c": 7}
"""The crops of images that random requests share."""


@dataclass(frozen=True)
class Spec:
    """A request in a test; ``waits_at``: indices of tokens whose rule is known only after the one before came back."""

    number: int
    text: tuple[int, ...]
    max_tokens: int = 4
    image: str | None = None
    crops: int = 2
    priority: int = 1
    arrived_at: float = 0.0
    deadline_at: float | None = None
    namespace: str = ""
    principal: str = ""
    weight: float = 1.0
    waits_at: frozenset[int] = frozenset()
    more: tuple[tuple[int, str], ...] = ()
    """Further images: each stands before the text token of that index."""
    stops_at: int | None = None
    """The request ends when token ``stops_at`` has come back, as by an end token."""
    embeds: EmbeddingSpec | None = None
    """The request asks for embeddings in place of tokens. What comes back counts as one token."""

    @property
    def images(self) -> tuple[str, ...]:
        """Keys of all images, in order."""
        first = () if self.image is None else (self.image,)
        return (*first, *(key for _, key in self.more))

    def prepared(self, key: str) -> PreparedImage:
        count = self.crops if key == self.image else CROPS[key]
        crops = np.zeros((count, 2, 2, 3), np.uint8)
        tiling = (1, count - 1)
        # Images share crops: "b" and "c" begin like "a".
        distinct = 1 if tiling == (1, 1) else count
        keys = tuple(f"crop {index % 4}" for index in range(distinct))
        image = PreparedImage(key, crops, tiling, 2, 2, crop_keys=keys)
        if self.embeds is not None and self.embeds.crops:
            return replace(image, key=f"{key}/crops", keeps_features=True)
        return image

    def submission(self) -> Submission:
        places = [(0, self.image)] if self.image is not None else []
        prompt: list[Token] = [0]
        begin = 0
        for place, key in [*places, *self.more]:
            prompt += [*self.text[begin:place], ImageBlock(key, IMAGE_POSITIONS)]
            begin = place
        return Submission(
            sequence_id=self.number,
            prompt=() if self.embeds else (*prompt, *self.text[begin:]),
            reads=self.embeds,
            images=tuple(self.prepared(key) for key in self.images),
            sampling=SamplingParams(),
            rule=TokenRule(),
            max_tokens=self.max_tokens,
            namespace=self.namespace,
            principal=self.principal,
            weight=self.weight,
            priority=self.priority,
            arrived_at=self.arrived_at,
            deadline_at=self.deadline_at,
        )


def text(number: int, length: int = 3, **options: Any) -> Spec:
    return Spec(number, tuple(1000 * number + i for i in range(length)), **options)


@dataclass
class Simulation:
    """``depth`` steps are out at most, in each lane. ``tokens``: what came back, by request; ``ended``: requests that
    are over. ``rng``: chooses the lane whose step ends first."""

    limits: RuntimeLimits = LIMITS
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    depth: int = 2
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)
    spoiled_images: set[str] = field(default_factory=set)
    now: float = 0.0
    checked: bool = True
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.policy)
        self.runtime = FakeRuntime(self.limits)
        self.specs: dict[int, Spec] = {}
        self.live: dict[int, Sequence] = {}
        two = self.limits.decodes_beside
        lanes = (Lane.NEW_WORK, Lane.DECODE) if two else (Lane.ALL,)
        self.out: dict[Lane, deque[StepPlan]] = {lane: deque() for lane in lanes}

    def add(self, spec: Spec) -> None:
        self.specs[spec.number] = spec
        self.live[spec.number] = self.scheduler.add(spec.submission())
        self.check()

    def abort(self, number: int) -> None:
        self.scheduler.abort(number)
        self.live.pop(number, None)
        self.ended.add(number)
        self.check()

    def spoil_image(self, key: str) -> None:
        """Its next embedding is not finite."""
        self.runtime.bad_images.add(key)
        self.spoiled_images.add(key)

    def turn(self, *, fail: bool = False) -> bool:
        """Launches a step if the pipeline has room, else or besides reads the oldest; False if there was neither."""
        for number in self.scheduler.expired(self.now):
            self.abort(number)
        plan = None
        for lane, out in self.out.items():
            if plan is None and len(out) < self.depth:
                plan = self.scheduler.schedule(self.now, lane)
        if plan is not None:
            self.runtime.launch(plan)
            self.out[plan.lane].append(plan)
            for row in plan.prefill + plan.decode:
                if row.sample is not None:
                    self.resume(row.sequence_id, ahead=True)
        self.check()
        is_full = all(len(out) == self.depth for out in self.out.values())
        if any(self.out.values()) and (plan is None or is_full):
            self.collect(fail)
            return True
        return plan is not None

    def collect(self, fail: bool, lane: Lane | None = None) -> StepPlan:
        """Collects the oldest step of ``lane``, or of a lane that ``rng`` chooses."""
        heads = [out[0] for out in self.out.values() if out]
        plan = self.rng.choice(heads) if lane is None else self.out[lane][0]
        if plan.after is not None:
            plan = next((p for p in heads if p.step_id <= plan.after), plan)
        self.out[plan.lane].popleft()
        if fail:
            self.runtime.fail_next = RuntimeError("scripted")
        try:
            result = self.runtime.collect(plan)
        except RuntimeError:
            for number in self.scheduler.fail_step(plan):
                self.failed.add(number)
                self.live.pop(number)
            self.check()
            return plan
        for number in result.non_finite & self.live.keys():
            self.not_finite.add(number)
            self.live.pop(number)
            self.scheduler.discard(number)
            self.check()
        for sequence, token in self.scheduler.commit(plan, result):
            number = sequence.sequence_id
            self.tokens.setdefault(number, []).append(token.id)
            stop = self.specs[number].stops_at
            if sequence.num_sampled in (sequence.submission.max_tokens, stop):
                self.scheduler.abort(number)
                del self.live[number]
                self.ended.add(number)
            else:
                self.resume(number, ahead=False)
        for number in result.readings.keys() & self.live.keys():
            found = result.readings[number]
            vectors = [v for v in (found.image, found.crops) if v is not None]
            self.tokens[number] = [int(sum(v.sum(dtype=np.float64) for v in vectors))]
            self.scheduler.abort(number)
            del self.live[number]
            self.ended.add(number)
        self.check()
        return plan

    def resume(self, number: int, *, ahead: bool) -> None:
        sequence = self.live[number]
        if sequence.rule is not None or sequence.num_planned >= sequence.submission.max_tokens:
            return
        if ahead and sequence.num_planned in self.specs[number].waits_at:
            return
        self.scheduler.resume(number, TokenRule())

    def drain(self) -> dict[int, list[int]]:
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 100_000, "no end"
        assert not self.live, f"left over: {sorted(self.live)}"
        return self.tokens

    def check(self) -> None:
        if self.checked:
            self.scheduler.check()


def alone(spec: Spec, limits: RuntimeLimits = LIMITS) -> list[int]:
    """What a request gives by itself, step by step, with nothing shared or cached. It is a reference: the invariants of
    the scheduler are checked where requests meet."""
    roomy = replace(limits, num_pages=max(limits.num_pages, 100), max_batch_size=1)
    simulation = Simulation(roomy, SchedulerPolicy(prefix_cache=False), depth=1, checked=False)
    simulation.add(
        replace(spec, priority=1, arrived_at=0.0, deadline_at=None, waits_at=frozenset())
    )
    return simulation.drain()[spec.number]


def random_spec(rng: random.Random, number: int, now: float = 0.0) -> Spec:
    """Texts share prefixes often, pictures repeat, some rules have to wait."""
    image = rng.choice([None, None, "a", "b", "c"])
    length = rng.randint(1, 20)
    stem = rng.choice([100, 100, 200])
    text = tuple(stem + min(i, 12) for i in range(length))
    max_tokens = rng.randint(1, 24)
    embeds = None
    if image is not None and rng.random() < 0.2:
        embeds = rng.choice([EmbeddingSpec(), EmbeddingSpec(image=False, crops=True)])
        max_tokens = 1
    more: tuple[tuple[int, str], ...] = ()
    if embeds is None and rng.random() < 0.25:
        text, max_tokens = text[:12], rng.randint(1, 16)
        places = sorted(
            rng.choice([0, rng.randrange(len(text))]) for _ in range(rng.choice([1, 2]))
        )
        more = tuple((place, rng.choice("abc")) for place in places)
    return Spec(
        number,
        text,
        max_tokens=max_tokens,
        image=image,
        crops=rng.randint(2, 7) if image is None else CROPS[image],
        more=more,
        priority=rng.randrange(3),
        arrived_at=now,
        deadline_at=now + rng.random() * 30 if rng.random() < 0.1 else None,
        namespace=rng.choice(["", "", "x"]),
        principal=(principal := rng.choice(["", "", "a", "b"])),
        weight={"": 1.0, "a": 0.5, "b": 4.0}[principal],
        waits_at=frozenset(rng.sample(range(24), rng.randint(0, 12))),
        stops_at=rng.randint(1, max_tokens) if rng.random() < 0.5 else None,
        embeds=embeds,
    )
