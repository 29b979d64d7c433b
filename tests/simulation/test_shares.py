"""Callers that ask all the time share the device by their weights, and nobody waits for ever. Bounds are in simulated
seconds; a step of a full batch takes some 50 ms."""

from dataclasses import replace

import pytest

from tests.simulation.callers import Habits
from tests.simulation.device import Rates
from tests.simulation.questions import Question
from tests.simulation.world import LIMITS, World, WorldPlan

QUESTIONS = [
    Question(
        "query",
        arguments=(("question", f"why {letter}"),),
        settings=(("max_tokens", 12), ("temperature", 0)),
    )
    for letter in "abcdefgh"
]


def world(seed, minutes, *habits, max_queue=200):
    limits = replace(LIMITS, max_batch_size=6, num_pages=400)
    setting = WorldPlan(limits, {"max_queue": max_queue}, Rates(), habits)
    return World(seed, minutes, setting, QUESTIONS).run()


EQUAL = (1.0, 1.0, 1.0)


@pytest.mark.slow_with(2, 3, EQUAL)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("weights", [EQUAL, (1.0, 2.0, 3.0)])
def test_tokens_are_shared_by_weight(seed, weights):
    """Each caller gets its share within a tenth, however many requests it has."""
    habits = [
        Habits(name, weight=weight, always=always)
        for name, weight, always in zip("abc", weights, (12, 25, 50), strict=True)
    ]
    found = world(seed, 2, *habits).watch.tokens
    for each in habits:
        share = found[each.name] / found.total()
        assert share == pytest.approx(each.weight / sum(weights), rel=0.1), found


@pytest.mark.slow
def test_a_single_caller_does_not_wait_for_a_flood():
    flood = Habits("a", always=60)
    alone = world(1, 1, Habits("b", always=1)).watch.longest["b"]
    beside = world(1, 1, flood, Habits("b", always=1)).watch.longest
    assert beside["b"] < 4 * alone < beside["a"]


@pytest.mark.slow
def test_the_least_priority_is_served_beside_the_best():
    """Every 10 s (``priority_aging_s``) a priority that was not served counts as a better one."""
    found = world(1, 2, Habits("a", high=0.95, low=1.0, always=10)).watch.longest["a"]
    assert found < 60
