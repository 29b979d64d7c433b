"""Slices: steps beside decoding that compute either crops or prompts (scheduler/order/slices.py)."""

from dataclasses import replace

from kestrel_engine.scheduler.budget import MOST_HELD, StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.types.embedding import EmbeddingSpec
from kestrel_engine.types.step import StepPlan
from tests.engine.scheduler.simulation import LIMITS, Simulation, Spec, alone, text
from tests.engine.scheduler.test_latency import Timed, decoders, p95, pictures

ROOMY = replace(LIMITS, num_pages=400, max_batch_size=32, max_seq_length=200)


def sliced(positions: int, crops: int) -> SchedulerPolicy:
    budget = StepBudget(prefill_positions=positions, crops=crops, idle_scale=1, slices=True)
    return SchedulerPolicy(budget=budget)


def picture(number: int, crops: int = 4, *, words: int = 2, **options) -> Spec:
    """A prompt of 10 positions for the image, and ``words``."""
    return text(number, words, image=f"image {number}", crops=crops, **options)


class Slices(Simulation):
    """``kinds``: of each step with new work, in order: crops as "c", prompts as "p", both as "cp"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds: list[str] = []
        self.plans: list[StepPlan] = []

    def turn(self, *, fail: bool = False) -> bool:
        known = {plan.step_id for out in self.out.values() for plan in out}
        more = super().turn(fail=fail)
        for plan in (plan for out in self.out.values() for plan in out):
            if plan.step_id not in known:
                self.plans.append(plan)
                if plan.encode or plan.prefill:
                    self.kinds.append("c" * bool(plan.encode) + "p" * bool(plan.prefill))
        return more

    def run_beside_decoding(self, *specs: Spec) -> None:
        """Answers ``specs`` while another request decodes, and checks all answers."""
        self.add(text(1000, 2, max_tokens=150))
        for _ in range(3):
            self.turn()
        self.kinds.clear()
        self.plans.clear()
        for spec in specs:
            self.add(spec)
        while not {spec.number for spec in specs} <= self.ended:
            self.turn()
        assert 1000 in self.live, "all steps were beside decoding"
        for spec in specs:
            assert self.tokens[spec.number] == alone(spec, replace(LIMITS, max_seq_length=200))


def simulation(positions: int = 40, crops: int = 6, depth: int = 3) -> Slices:
    return Slices(ROOMY, sliced(positions, crops), depth=depth)


def test_crops_fill_a_step_and_prompts_of_several_images_another():
    """A step holds 6 crops, or 40 positions: three prompts of 12."""
    run = simulation()
    run.run_beside_decoding(*(picture(i, max_tokens=1) for i in range(6)))
    assert run.kinds == ["c", "c", "p", "c", "c", "p"]
    counts = [sum(p.last - p.first for p in plan.encode) for plan in run.plans if plan.encode]
    assert counts == [6, 6, 6, 6]
    assert [len(plan.prefill) for plan in run.plans if plan.prefill] == [3, 3]
    assert all(plan.decode for plan in run.plans), "each of these steps also decodes"


def test_without_decoding_a_step_computes_both():
    run = simulation(crops=100)
    run.add(picture(1, max_tokens=1))
    run.drain()
    assert run.kinds == ["cp"]


def test_a_prompt_without_crops_to_wait_for_is_computed_at_once():
    run = simulation()
    run.run_beside_decoding(text(1, 3, max_tokens=1))
    assert run.kinds == ["p"]


def test_a_prompt_waits_for_a_bounded_number_of_steps_of_crops():
    """Its few positions fill no step, and the crops of the others do not end."""
    run = simulation(positions=1000, crops=1)
    run.run_beside_decoding(text(1, 3, max_tokens=1), picture(2, 30, max_tokens=1))
    assert run.kinds == ["c"] * MOST_HELD + ["p"] + ["c"] * (30 - MOST_HELD) + ["p"]


def test_crops_wait_for_one_step_of_prompts_at_most():
    """Texts that fill every step leave half of the steps to crops."""
    run = simulation(positions=10, crops=1, depth=2)
    texts = [text(i, 9, max_tokens=1) for i in range(2, 22)]
    run.run_beside_decoding(*texts, picture(30, 7, max_tokens=1))
    first = run.kinds.index("c")
    assert first <= 1
    assert run.kinds[first : first + 13] == ["c", "p"] * 6 + ["c"]


def test_readings_of_images_need_no_step_of_prompts():
    run = simulation(positions=1000, crops=3)
    reading = picture(1, 5, max_tokens=1, embeds=EmbeddingSpec())
    run.add(text(1000, 2, max_tokens=150))
    run.turn()
    run.add(reading)
    run.add(picture(2, 20, max_tokens=1))
    while 1 not in run.ended:
        run.turn()
    assert run.tokens[1] == alone(reading)


def cost(plan: StepPlan) -> float:
    """Seconds of a step. One prompt of an image takes 7 ms, and each further one 3.5."""
    crops = sum(piece.last - piece.first for piece in plan.encode)
    prefill = 3.5e-3 * (1 + len(plan.prefill)) if plan.prefill else 0.0
    return (4e-3 if plan.decode else 0.0) + 0.85e-3 * crops + prefill


def disturbance(budget: StepBudget) -> tuple[float, float]:
    """Returns the p95 gap of sixteen that decode while forty images of 9 crops are computed, and the seconds of
    that."""
    run = Timed(policy=SchedulerPolicy(budget=budget), cost=cost, depth=3)
    specs = pictures([0.1] * 40)
    run.run([*decoders(2000), *specs], specs)
    end = max(run.times[spec.number][0] for spec in specs)
    return p95(run.gaps(range(1, 17), 0.1, end)), end - 0.1


def test_gaps_are_short_and_images_take_less_time_than_with_short_steps_of_both():
    large_gap, _ = disturbance(StepBudget(prefill_positions=11680, crops=48))
    short = StepBudget(prefill_positions=2560, crops=14, idle_scale=28)
    short_gap, short_s = disturbance(short)
    gap, seconds = disturbance(replace(short, slices=True))
    assert gap <= min(short_gap, 0.4 * large_gap)
    assert seconds <= 0.9 * short_s
