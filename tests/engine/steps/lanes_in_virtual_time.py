"""Simulates a trace on a device of two lanes: requests/s and gaps between tokens for each policy of the scheduler.

Scheduler and step loop are the engine's. The device and the callers are models in virtual time (`Card`), whose times
are parameters, so a run of a minute takes seconds, and a second run gives the same figures. The defaults are Moondream
2 on one H100 in bfloat16 (docs/lab/performance.md, docs/lab/measurements.md).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.reports.report import quantile
from benchmarks.traffic.chart_trace import NUM_IMAGES, NUM_QUESTIONS, TOKENS, shape_of
from kestrel_engine import clock
from kestrel_engine.config.sizes import default_sizes
from kestrel_engine.runtime.gpu.prefill.graphs import MAX_BLOCKS
from kestrel_engine.runtime.gpu.vision.tower import MAX_CROPS, even_size
from kestrel_engine.runtime.protocol import StepHandle
from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.steps import loop
from kestrel_engine.steps.active import SkillSubmission
from kestrel_engine.steps.delivery import StepReport
from kestrel_engine.types.requests import ImageBlock, PreparedImage, SamplingParams
from kestrel_engine.types.step import (
    Lane,
    RuntimeLimits,
    StepPlan,
    StepResult,
    StepToken,
    TokenRule,
)
from kestrel_engine.types.submission import Submission

IMAGE_POSITIONS = 729
TOKEN = StepToken(100)
RULE = TokenRule()


@dataclass(frozen=True)
class Card:
    """Milliseconds of the parts of a step alone on the device, and of the host.

    ``beside_crop``, ``beside_image``: what a decode step takes longer for each crop and each image prefix of the pass
    beside it, whose kernels hold the multiprocessors. ``beside_row``: for each of its rows. ``stolen``: how much longer
    the new work takes then, as a share of the decode step's time alone. ``with_room``, ``with_room_row``,
    ``room_stolen``: a decode step beside new work that leaves room, each of its rows, and what ``stolen`` is then. Such
    work takes ``room`` longer in any case, as a share.
    ``launch_image``, ``launch_pass``: of a launch, for each image and for each pass of the tower or over prefixes.
    ``host_wait``: the mean of what a launch takes longer while other threads have the interpreter. ``prepare``: from a
    request until the step thread has it, for a new image and for a known one; ``jitter``: the mean of what this takes
    longer.
    """

    decode: float = 1.28
    decode_row: float = 0.0563
    vision: float = 0.9
    crop: float = 1.25
    image: float = 0.5
    prefix: float = 3.3
    prompts: float = 1.8
    question: float = 0.24
    beside_vision: float = 0.6
    beside_crop: float = 0.275
    beside_prefill: float = 2.5
    beside_image: float = 0.78
    beside_row: float = 0.055
    stolen: float = 0.85
    with_room: float = 1.6
    with_room_row: float = 0.27
    room_stolen: float = 0.5
    room: float = 0.06
    launch_decode: float = 0.5
    launch_new: float = 1.0
    launch_image: float = 0.9
    launch_pass: float = 0.5
    collect: float = 0.05
    host_wait: float = 0.3
    prepare: tuple[float, float] = (8.0, 1.0)
    jitter: float = 5.0

    def launch_ms(self, plan: StepPlan) -> float:
        crops, prefixes = _crops(plan), _prefixes(plan)
        if not crops and not plan.prefill:
            return self.launch_decode
        passes = -(-crops // MAX_CROPS) - (-prefixes // MAX_BLOCKS)
        images = sum(piece.first == 0 for piece in plan.encode)
        return self.launch_new + self.launch_image * images + self.launch_pass * passes

    def decode_ms(self, plan: StepPlan) -> float:
        return self.decode + self.decode_row * len(plan.decode) if plan.decode else 0.0

    def vision_ms(self, plan: StepPlan) -> float:
        crops = _crops(plan)
        images = sum(piece.last == piece.image.num_crops for piece in plan.encode)
        passes = -(-crops // MAX_CROPS)
        return self.vision * passes + self.crop * crops + self.image * images

    def prefill_ms(self, plan: StepPlan) -> float:
        prefixes = _prefixes(plan)
        if prefixes:
            passes = -(-prefixes // MAX_BLOCKS)
            return 0.9 * passes + self.prefix * prefixes + 0.1 * len(plan.prefill)
        return self.prompts + self.question * len(plan.prefill) if plan.prefill else 0.0

    def beside_ms(self, decode: StepPlan, new: StepPlan, *, vision: bool) -> float:
        """Of a decode step beside the vision or the prefill of ``new``."""
        if new.leave_room:
            return self.with_room + self.with_room_row * len(decode.decode)
        ms = self.decode + self.beside_row * len(decode.decode)
        if vision:
            return ms + self.beside_vision + self.beside_crop * _largest(_crops(new), MAX_CROPS)
        prefixes = _largest(_prefixes(new), MAX_BLOCKS)
        return ms + self.beside_prefill + self.beside_image * prefixes


def _crops(plan: StepPlan) -> int:
    return sum(piece.last - piece.first for piece in plan.encode)


def _prefixes(plan: StepPlan) -> int:
    return sum(row.start == 0 for row in plan.prefill)


def _largest(count: int, limit: int) -> int:
    """The size of the passes over ``count`` crops or prefixes, as the runtime divides them."""
    return even_size(count, limit) if count else 0


@dataclass
class _Running:
    plan: StepPlan
    left_ms: float
    prefill_ms: float
    """The last part of the time. Before it, the step encodes images."""
    after: int | None
    """The step of the other lane that must have ended."""
    begun_at: float | None = None

    @property
    def until_change_ms(self) -> float:
        """Until the step ends, or its images are encoded."""
        vision = self.left_ms - self.prefill_ms
        return vision if self.prefill_ms and vision > 1e-9 else self.left_ms


class Device:
    """Two lanes of steps in virtual time, in ms. With one lane, steps run one after the other."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._now = 0.0
        self._queues: dict[Lane, deque[_Running]] = {lane: deque() for lane in Lane}
        self.ended: dict[int, tuple[float, float]] = {}
        """The end of each step, and the time for which it ran, by step id."""
        self._last_decode: int | None = None

    def launch(self, now: float, plan: StepPlan) -> None:
        self.run_to(now)
        prefill_ms = self._card.prefill_ms(plan)
        ms = self._card.decode_ms(plan) + self._card.vision_ms(plan) + prefill_ms
        after = plan.after
        if plan.lane is Lane.NEW_WORK:
            after = self._last_decode
        elif plan.lane is Lane.DECODE:
            self._last_decode = plan.step_id
        self._queues[plan.lane].append(_Running(plan, ms, prefill_ms, after))

    def run_to(self, now: float) -> None:
        while self._now < now:
            self._advance(now)

    def end_of(self, plan: StepPlan) -> tuple[float, float]:
        """Returns the entry of ``ended`` for a step, after which nothing is launched until its end."""
        while plan.step_id not in self.ended:
            self._advance(float("inf"))
        return self.ended[plan.step_id]

    def _advance(self, until: float) -> None:
        """Runs until the next step ends, at most until ``until``."""
        active = {
            lane: queue[0]
            for lane, queue in self._queues.items()
            if queue and (queue[0].after is None or queue[0].after in self.ended)
        }
        if not active:
            assert until < float("inf"), "steps wait for one another"
            self._now = max(self._now, until)
            return
        speed, card = dict.fromkeys(Lane, 1.0), self._card
        roomy = Lane.NEW_WORK in active and active[Lane.NEW_WORK].plan.leave_room
        if roomy:
            speed[Lane.NEW_WORK] = 1 - card.room
        if len(active) > 1:
            decode, new = active[Lane.DECODE].plan, active[Lane.NEW_WORK]
            vision = new.left_ms > new.prefill_ms + 1e-9
            beside = card.beside_ms(decode, new.plan, vision=vision)
            speed[Lane.DECODE] = card.decode_ms(decode) / beside
            stolen = card.room_stolen if roomy else card.stolen
            speed[Lane.NEW_WORK] -= stolen * speed[Lane.DECODE]
        for step in active.values():
            step.begun_at = self._now if step.begun_at is None else step.begun_at
        ms = min(step.until_change_ms / speed[lane] for lane, step in active.items())
        ms = min(ms, until - self._now)
        self._now += ms
        for lane, step in active.items():
            step.left_ms -= ms * speed[lane]
            if step.left_ms <= 1e-9:
                self._queues[lane].popleft()
                assert step.begun_at is not None
                self.ended[step.plan.step_id] = self._now, self._now - step.begun_at


class VirtualRuntime:
    """Implements ``protocol.Runtime`` in virtual time: launching and collecting a step take the host's time, and the
    device the card's."""

    def __init__(self, limits: RuntimeLimits, card: Card) -> None:
        self.limits, self._card, self._device = limits, card, Device(card)
        self._rng = random.Random(2)
        self.now = 0.0
        """In ms."""

    def clock(self) -> float:
        return self.now / 1e3

    def launch(self, plan: StepPlan) -> StepPlan:
        card = self._card
        self.now += card.launch_ms(plan)
        self.now += self._rng.expovariate(1 / card.host_wait)
        self._device.launch(self.now, plan)
        return plan

    def is_done(self, handle: StepHandle) -> bool:
        assert isinstance(handle, StepPlan)
        self._device.run_to(self.now)
        return handle.step_id in self._device.ended

    def collect(self, handle: StepHandle) -> StepResult:
        assert isinstance(handle, StepPlan)
        end, took = self._device.end_of(handle)
        self.now = max(self.now, end) + self._card.collect
        rows = handle.prefill + handle.decode
        tokens = {row.sequence_id: TOKEN for row in rows if row.sample is not None}
        return StepResult(tokens=tokens, vision_s=took / 1e3)

    def close(self) -> None: ...


class Counted:
    """A skill's control and output: any tokens, up to the request's limit."""

    def rule(self, num_before: int) -> TokenRule:
        return RULE

    def accept(self, token: StepToken) -> None:
        return None


@dataclass
class Found:
    """Instants in ms when the tokens of each request came."""

    tokens_at: dict[int, list[float]] = field(default_factory=dict)


class Callers:
    """The callers of a closed loop, which stand in place of the delivery thread: an answer that ends is followed by the
    next question of the trace."""

    def __init__(self, runtime: VirtualRuntime, card: Card, tokens: int, requests: int) -> None:
        self._runtime, self._card, self._tokens = runtime, card, tokens
        self._trace = iter(list(enumerate(questions(0)))[:requests])
        self._known: set[int] = set()
        self._rng = random.Random(1)
        self.arriving: list[tuple[float, int, int, int]] = []
        """A heap of (instant, number, image, tokens of the question)."""
        self.found = Found()

    def ask(self) -> None:
        now = self._runtime.now
        for number, (image, count) in itertools.islice(self._trace, 1):
            ms = self._card.prepare[image in self._known] + self._rng.expovariate(
                1 / self._card.jitter
            )
            self._known.add(image)
            heapq.heappush(self.arriving, (now + ms, number, image, count))

    def put(self, reports: list[StepReport]) -> None:
        for report in reports:
            if report.token is not None:
                at = self.found.tokens_at.setdefault(report.sequence_id, [])
                at.append(self._runtime.now)
            if report.end is not None:
                self.ask()

    def send_due(self, engine: loop.EngineLoop) -> None:
        while self.arriving and self.arriving[0][0] <= self._runtime.now:
            _, number, image, count = heapq.heappop(self.arriving)
            made = submission(number, image, count, self._tokens, self._runtime.clock())
            skill: Any = Counted()
            engine.submit(SkillSubmission(str(number), made, skill, skill))


def questions(seed: int) -> list[tuple[int, int]]:
    """Returns (image, tokens) of the questions of the trace."""
    rng = random.Random(seed)
    twice = set(rng.sample(range(NUM_IMAGES), NUM_QUESTIONS - NUM_IMAGES))
    images = [i for i in range(NUM_IMAGES) for _ in range(1 + (i in twice))]
    return [(image, rng.randint(*TOKENS)) for image in images]


def submission(number: int, image: int, count: int, tokens: int, now: float) -> Submission:
    tiling = (3, 3) if shape_of(image).width == 420 else (2, 4)
    crops = np.zeros((1 + tiling[0] * tiling[1], 1, 1, 3), np.uint8)
    prepared = PreparedImage(f"image {image}", crops, tiling, 1, 1)
    block = ImageBlock(prepared.key, IMAGE_POSITIONS)
    text = range(1000 + number, 1000 + number + count)
    return Submission(
        sequence_id=number,
        prompt=(0, block, *text),
        images=(prepared,),
        sampling=SamplingParams(),
        rule=RULE,
        max_tokens=tokens,
        arrived_at=now,
    )


def simulate(
    card: Card,
    policy: SchedulerPolicy,
    *,
    in_flight: int,
    tokens: int,
    requests: int,
    beside: bool,
    batch: int = 64,
) -> Found:
    """Runs ``requests`` questions of a closed loop of ``in_flight`` callers. ``beside``: as the setting."""
    limits = RuntimeLimits(
        num_pages=13_000,
        page_size=10,
        max_batch_size=batch,
        max_seq_length=2048,
        vocab_size=51_200,
        decodes_beside=beside,
        leaves_room=beside,
    )
    runtime = VirtualRuntime(limits, card)
    callers = Callers(runtime, card, tokens, requests)
    delivery: Any = callers
    with clock.installed(now=runtime.clock):
        engine = loop.EngineLoop(
            runtime, delivery, policy=policy, depth=default_sizes(cuda=True).steps_out
        )
        for _ in range(in_flight):
            callers.ask()
        # What the loop's thread does, in virtual time: it sleeps until the next request comes.
        while callers.arriving or not engine.is_idle:
            if engine.is_idle:
                runtime.now = max(runtime.now, callers.arriving[0][0])
            callers.send_due(engine)
            engine.turn()
    return callers.found


def policy_for(itl_target_ms: float) -> SchedulerPolicy:
    """That of an engine on CUDA."""
    sizes = default_sizes(cuda=True, itl_target_ms=itl_target_ms)
    budget = StepBudget(
        prefill_positions=sizes.step_prefill_positions,
        crops=sizes.step_crops,
        pause=sizes.step_pause,
    )
    return SchedulerPolicy(budget=budget, itl_target_s=itl_target_ms / 1e3)


def summary(found: Found, in_flight: int) -> dict[str, float]:
    """Returns rates and gaps in ms, without the first and the last requests, when not all callers are there."""
    ends = sorted(at[-1] for at in found.tokens_at.values())
    edge = min(in_flight, len(ends) // 4)
    begin, end = ends[edge - 1], ends[-edge - 1]
    gaps = [
        later - earlier
        for at in found.tokens_at.values()
        for earlier, later in itertools.pairwise(at)
        if begin <= earlier and later <= end
    ]
    return {
        "requests/s": 1e3 * (len(ends) - 2 * edge) / (end - begin),
        "gap p95": quantile(gaps, 0.95),
        "gap p99": quantile(gaps, 0.99),
    }
