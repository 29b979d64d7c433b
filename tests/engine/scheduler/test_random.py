"""Random arrivals, aborts, deadlines, preemptions, evictions and failures: no page is lost, no token changes."""

import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from tests.engine.scheduler.simulation import LIMITS, Simulation, alone, random_spec
from tests.examples import given_examples

COMPARED: dict[tuple, list[int]] = {}


def expected(spec):
    key = (spec.text, spec.max_tokens, spec.image, spec.more, spec.stops_at, spec.embeds)
    if key not in COMPARED:
        COMPARED[key] = alone(spec)
    return COMPARED[key]


def random_simulation(rng, *, checked=True):
    limits = replace(
        LIMITS,
        num_pages=rng.choice([13, 16, 24, 60]),
        max_batch_size=rng.choice([1, 2, 3, 6]),
        decodes_beside=rng.random() < 0.5,
    )
    budget = StepBudget(
        prefill_positions=rng.choice([3, 12, 50]),
        crops=rng.choice([1, 3, 9]),
        idle_scale=rng.choice([1, 4]),
        slices=rng.random() < 0.3,
    )
    policy = SchedulerPolicy(
        budget=budget,
        prefix_cache=rng.random() < 0.7,
        prefix_pages=rng.choice([None, 6, 12]),
        kept_embeddings=rng.choice([0, 1, 4]),
        kept_crops=rng.choice([0, 1, 3, 20]),
        aging_s=rng.choice([1.0, 100.0]),
        itl_target_s=rng.choice([-1.0, 1.0]),  # All steps of new work count as long, or as short.
    )
    depth = rng.choice([1, 2, 2, 3])
    return Simulation(limits, policy, depth=depth, checked=checked, rng=rng)


def run(rng, operations, *, failures=True, checked=True):
    """Returns the simulation after ``operations`` random moves and a drain, with the requests that were disturbed."""
    simulation = random_simulation(rng, checked=checked)
    disturbed, number, done = set(), 0, 0
    while done < operations:
        done += 1
        simulation.now += rng.random()
        choice = rng.random()
        if choice < 0.25 and len(simulation.live) < 12:
            number += 1
            simulation.add(random_spec(rng, number, simulation.now))
        elif failures and choice < 0.265 and simulation.live:
            simulation.runtime.bad_sequences.add(rng.choice(sorted(simulation.live)))
        elif failures and choice < 0.275:
            simulation.spoil_image(rng.choice("abc"))
        elif choice < 0.3 and simulation.live:
            victim = rng.choice(sorted(simulation.live))
            disturbed.add(victim)
            simulation.abort(victim)
        else:
            simulation.turn(fail=failures and rng.random() < 0.02)
    simulation.drain()
    return simulation, disturbed


def check_end(simulation, disturbed):
    simulation.scheduler.check()
    stats = simulation.scheduler.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    for number in simulation.not_finite:
        images = simulation.specs[number].images
        is_bad = number in simulation.runtime.bad_sequences
        assert is_bad or simulation.spoiled_images.intersection(images)
    for number, spec in simulation.specs.items():
        have, want = simulation.tokens.get(number, []), expected(spec)
        failed = simulation.failed | simulation.not_finite
        if number in disturbed | failed or (spec.deadline_at and not have):
            assert have == want[: len(have)]
        else:
            assert have == want, f"request {number} of {spec}"


@given_examples(8, 60, seed=st.integers(0, 2**32))
def test_random_histories(seed):
    check_end(*run(random.Random(seed), 80))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 5))
def test_no_page_is_lost_in_100_000_operations(first):
    """In ten parts, so that none of them nears the limit of a test on busy cores."""
    for seed in range(first, first + 5):
        check_end(*run(random.Random(1_000_000 + seed), 2_000))


def test_random_histories_preempt_and_hit_the_cache():
    """The histories above are of use only if they reach what they are about."""
    preemptions = hits = spoiled = embedded = reused = 0
    for seed in range(20):
        simulation, _ = run(random.Random(seed), 200, checked=False)
        spoiled += len(simulation.not_finite - simulation.runtime.bad_sequences)
        preemptions += simulation.scheduler.stats.preemptions
        hits += simulation.scheduler.stats.cached_positions
        embedded += sum(simulation.specs[number].embeds is not None for number in simulation.ended)
        reused += sum(len(p.reused) for plan in simulation.runtime.plans for p in plan.encode)
    assert reused > 50
    assert preemptions > 10
    assert embedded > 10
    assert hits > 250
    assert spoiled > 5
