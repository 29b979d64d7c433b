"""Latency under load on the fake runtime, in virtual time: nothing here depends on the machine.

The device costs, in ms: decode 3 a step, vision 12 for 9 crops, prefill 4 for an image prefix of 730 positions (text in
proportion); a step that runs the decoder at all costs at least 3 of that, for the weights are read. Steps run one after
the other and the host costs nothing, so a run without decoding is the device at its best.

What can be had. While steps take on w ms of new work beside a decode of d ms, those who decode see gaps of
i = (d + w) / d times the quiet one, and a backlog takes c = (d + w) / w times as long as it would alone. So
(i - 1) (c - 1) = 1, for the mean gap whatever the policy: with ITL at 2.5 times the quiet one a backlog takes 1.67
times as long, and a burst of 20 pictures in one instant cannot also be done within 1.3 times its time alone, which
needs gaps of 4.33. (p95 leaves one gap in twenty free, but a stall of 180 ms there is not what the bar is for.) Both
bars hold together when pictures come over time: the device then idles between them when they are alone, and that slack
pays for the decoding. 20 pictures at intervals of a ms need max(20 * 16, 19 a + 16) ms alone; one each 25 ms, 40 a
second or 64 % of the device, is what the test takes, evenly and at random. For the burst the test holds ITL to 2.5 and
the pictures to the 1.75 that 3 crops, or a prefix, a step make of it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.types.requests import ImageBlock, num_positions
from kestrel_engine.types.step import PREVIOUS, Lane, RuntimeLimits, StepPlan
from tests.engine.scheduler.simulation import Simulation, Spec
from tests.fake_runtime import FakeRuntime

DECODE_S, CROP_S, POSITION_S = 3e-3, 12e-3 / 9, 4e-3 / 730
ALONE_S = 16e-3
"""Vision and prefix of one picture of 9 crops."""
QUIET_ITL_S = DECODE_S
LIMITS = RuntimeLimits(
    num_pages=6000, page_size=10, max_batch_size=64, max_seq_length=2500, vocab_size=1000
)


def cost(plan: StepPlan) -> float:
    vision = sum(piece.last - piece.first for piece in plan.encode) * CROP_S
    known = [[t for t in row.tokens if t is not PREVIOUS] for row in plan.prefill]
    prefill = sum(map(num_positions, known)) * POSITION_S
    decoder = prefill + (DECODE_S if plan.decode else 0.0)
    return vision + (max(DECODE_S, decoder) if plan.prefill or plan.decode else 0.0)


@dataclass
class Timed(Simulation):
    """A simulation whose clock goes on by what steps cost. ``times``: when each token came, by request."""

    limits: RuntimeLimits = LIMITS
    checked: bool = False
    cost: Callable[[StepPlan], float] = cost
    times: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runtime = FakeRuntime(self.limits, lambda fed: 21 + len(fed) % 900)

    def collect(self, fail: bool, lane: Lane | None = None) -> StepPlan:
        plan = super().collect(fail, lane)
        self.now += self.cost(plan)
        for row in (*plan.prefill, *plan.decode):
            times = self.times.setdefault(row.sequence_id, [])
            num_tokens = len(self.tokens.get(row.sequence_id, ()))
            times += [self.now] * (num_tokens - len(times))
        return plan

    def run(self, specs: list[Spec], awaited: list[Spec] | None = None) -> None:
        """Each request joins when its time has come; ends when all, or all of ``awaited``, are answered."""
        waiting = sorted(specs, key=lambda spec: spec.arrived_at)
        numbers = {spec.number for spec in (specs if awaited is None else awaited)}
        while (waiting or self.live) and not numbers <= self.ended:
            if not self.live and not any(self.out.values()):
                self.now = max(self.now, waiting[0].arrived_at)
            while waiting and waiting[0].arrived_at <= self.now:
                self.add(waiting.pop(0))
            self.turn()

    def ttft(self, number: int) -> float:
        return self.times[number][0] - self.specs[number].arrived_at

    def gaps(self, numbers: range, begin: float, end: float) -> list[float]:
        """Gaps between tokens of ``numbers`` that lie in the window, in part or whole."""
        return [
            later - earlier
            for number in numbers
            for earlier, later in zip(self.times[number], self.times[number][1:], strict=False)
            if later > begin and earlier < end
        ]


def p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


@dataclass(frozen=True)
class PrefixSpec(Spec):
    """A picture of 9 crops whose prefix takes 730 positions."""

    def submission(self):
        assert self.image is not None
        prompt = (0, ImageBlock(self.image, 729), *self.text)
        return replace(super().submission(), prompt=prompt)


def pictures(arrivals: list[float]) -> list[Spec]:
    return [
        PrefixSpec(100 + i, (50, 51), max_tokens=1, image=f"p{i}", crops=9, arrived_at=at)
        for i, at in enumerate(arrivals)
    ]


RUNNING = range(1, 17)
BEGIN = 0.3
"""When the first picture comes: those who decode have been at it for a while."""


def decoders(num_tokens: int = 300) -> list[Spec]:
    return [Spec(i, (100 + i, 7, 8), max_tokens=num_tokens) for i in RUNNING]


def arrivals(kind: str) -> list[float]:
    if kind == "burst":
        return [BEGIN] * 20
    if kind == "even":
        return [BEGIN + 0.025 * i for i in range(20)]
    rng = random.Random(int(kind))
    times = [BEGIN]
    while len(times) < 20:
        times.append(times[-1] + rng.expovariate(40))
    return times


def measure(kind: str) -> tuple[float, float]:
    """(p95 ITL over quiet ITL while pictures come and are worked on, time of the pictures over their time alone)."""
    alone = Timed()
    alone.run(pictures(arrivals(kind)))
    busy = Timed()
    busy.run(decoders() + pictures(arrivals(kind)))
    numbers = range(100, 120)
    quiet = busy.gaps(RUNNING, 0.1, BEGIN - 0.01)
    assert p95(quiet) == pytest.approx(QUIET_ITL_S)
    ends = [max(run.times[n][0] for n in numbers) - BEGIN for run in (alone, busy)]
    window = busy.gaps(RUNNING, BEGIN, BEGIN + ends[1])
    assert len(window) > 16 * 20
    return p95(window) / QUIET_ITL_S, ends[1] / ends[0]


@pytest.mark.slow_with("2", "3", "4", "5")
@pytest.mark.parametrize("kind", ["even", "1", "2", "3", "4", "5"])
def test_images_that_come_over_time_disturb_nobody_and_are_done_in_time(kind):
    itl, done = measure(kind)
    assert itl <= 2.5
    assert done <= 1.3


def test_a_burst_in_one_instant_keeps_to_the_gap_and_takes_what_follows_from_it():
    itl, done = measure("burst")
    assert itl <= 2.5
    assert done <= 1.8
    assert (itl - 1) * (done - 1) == pytest.approx(1, rel=0.1)


SHORT = Spec(100, (5,) * 4, max_tokens=5)
"""With the BOS a prompt of five tokens."""


def quiet_ttft() -> float:
    run = Timed()
    run.run([SHORT])
    assert run.ttft(100) == pytest.approx(DECODE_S)
    return run.ttft(100)


@pytest.mark.parametrize(
    ("num_tokens", "num_short"), [(400, 20), pytest.param(1000, 40, marks=pytest.mark.slow)]
)
def test_a_short_request_beside_long_answers(num_tokens, num_short):
    """Sixteen write long answers; short requests come at random instants.

    What is running and what was launched behind it end first, then comes the request's own step: 3 quiet values less
    the part of the running step that is over.
    """
    rng = random.Random(7)
    short = [
        replace(SHORT, number=100 + i, arrived_at=0.3 + 0.05 * i + rng.random() * 0.02)
        for i in range(num_short)
    ]
    run = Timed()
    run.run([*decoders(num_tokens), *short])
    assert p95([run.ttft(spec.number) for spec in short]) <= 3 * quiet_ttft()


def test_a_short_request_beside_long_prompts():
    """Sixteen prompts of 1,000 tokens are being computed: a short one waits for steps that are out, not for prompts.

    Those steps hold 768 positions and a decode, 7.2 ms each, so 3 quiet values can't be had; in order of arrival it
    were 25. The long ones are done as soon as without it.
    """
    long = [Spec(i, tuple(range(i, 1000 + i)), max_tokens=50) for i in RUNNING]
    ends = []
    for short in ([], [replace(SHORT, arrived_at=0.05)]):
        run = Timed()
        run.run([*long, *short])
        ends.append(max(run.times[i][0] for i in RUNNING))
    assert run.ttft(100) <= 7 * quiet_ttft()
    assert ends[1] <= 1.01 * ends[0]


def test_a_long_prompt_is_not_put_off_for_ever():
    """Short prompts take every step's whole budget; the long one, older by more than its length is worth, gets on."""
    text = tuple(range(100, 290))
    short = [Spec(100 + i, text, max_tokens=1, arrived_at=0.0016 * i) for i in range(700)]
    run = Timed(policy=SchedulerPolicy(prefix_cache=False))
    run.run([*decoders(500), Spec(50, tuple(range(500)), max_tokens=1, arrived_at=0.3), *short])
    waiting = [run.ttft(spec.number) for spec in short if spec.arrived_at > 1.0]
    assert max(waiting) > 0.05, "the device had time for all of them"
    assert run.ttft(50) < 0.6
