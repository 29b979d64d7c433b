"""Steps for favoured sequences alone, on a device whose steps take as long as they have rows: 2 ms and 1 ms a row."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from kestrel_engine.types.step import RuntimeLimits, StepPlan
from tests.engine.scheduler.simulation import Spec
from tests.engine.scheduler.test_latency import LIMITS, Timed, p95

ROWS = replace(LIMITS, max_batch_size=16)


def by_rows(plan: StepPlan) -> float:
    return 2e-3 + 1e-3 * (len(plan.decode) + len(plan.prefill))


@dataclass
class ByRows(Timed):
    """A simulation on that device."""

    limits: RuntimeLimits = ROWS
    cost: Callable[[StepPlan], float] = by_rows


def flood(count, **options):
    return [
        Spec(n, (100 + n, 7, 8), max_tokens=100 + n % 30, principal="flood", **options)
        for n in range(1, count + 1)
    ]


def calls(count, principal, priority=1, every_s=0.4):
    """One after the other, each of 25 tokens."""
    return [
        Spec(
            1000 + i,
            (5, 6, 7),
            max_tokens=25,
            arrived_at=0.3 + every_s * i,
            principal=principal,
            priority=priority,
        )
        for i in range(count)
    ]


def seconds(run, specs):
    return p95([run.times[spec.number][-1] - spec.arrived_at for spec in specs])


@pytest.mark.parametrize(
    ("principal", "priority", "most"), [("other", 1, 3.0), ("other", 0, 2.0), ("flood", 0, 2.0)]
)
def test_an_answer_beside_a_full_batch_does_not_take_as_long_as_the_batch(
    principal, priority, most
):
    """A step for all takes 6 times as long as one of a single row; in such steps alone an answer would too."""
    own = calls(10, principal, priority)
    idle, busy = ByRows(), ByRows()
    idle.run(own)
    busy.run(flood(100) + own, awaited=own)
    assert seconds(busy, own) <= most * seconds(idle, own)


def test_the_others_get_their_part_of_the_time():
    """Half of it, while one of two principals runs a single answer at a time without a break."""
    long = Spec(1000, (5, 6, 7), max_tokens=400, arrived_at=0.3, principal="other")
    run = ByRows()
    run.run([*flood(100), long], awaited=[long])
    begin, end = run.times[1000][0], run.times[1000][-1]
    plans = run.runtime.plans
    assert any(len(plan.decode) == 1 for plan in plans)
    tokens = sum(begin < at <= end for n in range(1, 101) for at in run.times.get(n, ()))
    full = (end - begin) * 15 / (2e-3 + 1e-3 * 16)
    assert 0.35 * full <= tokens <= 0.65 * full


def test_without_others_every_step_is_for_all():
    run = ByRows()
    run.run(flood(40))
    sizes = {len(plan.decode) for plan in run.runtime.plans[5:60]}
    assert min(sizes) >= 10
    mixed = ByRows()
    mixed.run([*flood(4), *[replace(s, number=100 + s.number, principal="b") for s in flood(4)]])
    alone = [plan for plan in mixed.runtime.plans[5:80] if len(plan.decode) == 4]
    assert not alone, "both keep within their shares"


def test_the_best_priority_waits_for_no_step_of_the_others_who_computed_before_it():
    """All of an answer's steps but those that were launched before it are for it alone."""
    run = ByRows()
    urgent = calls(6, "other", 0)
    run.run(flood(100) + urgent, awaited=urgent)
    for spec in urgent:
        plans = [p for p in run.runtime.plans if spec.number in computed(p)]
        assert [len(plan.decode) for plan in plans[1:]] == [1] * (len(plans) - 1)


def test_the_best_priority_without_end_leaves_others_a_fifth_of_the_time():
    """One principal always has more requests of the best priority than places, another one requests of its share."""
    urgent = [
        Spec(1000 + i, (5, 6, 7), max_tokens=50, arrived_at=0.3, principal="other", priority=0)
        for i in range(200)
    ]
    run = ByRows()
    run.run(flood(100) + urgent, awaited=urgent[:120])
    begin, end = 2.0, max(run.times[spec.number][-1] for spec in urgent[:120])
    own = [at for n in range(1, 101) for at in run.times.get(n, ()) if begin < at <= end]
    full = (end - begin) * 8 / (2e-3 + 1e-3 * 16)
    assert 0.15 * full <= len(own) <= 0.3 * full
    pauses = [later - earlier for earlier, later in itertools.pairwise(sorted(own))]
    assert max(pauses) < 0.4, "32 steps of 8 rows and one of all"


def computed(plan):
    return {row.sequence_id for row in (*plan.prefill, *plan.decode)}
