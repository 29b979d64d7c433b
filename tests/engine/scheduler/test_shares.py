"""Principals: the batch, its places and new work are shared by weight; what one leaves unused the others get."""

from collections import Counter
from dataclasses import replace

import pytest

from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.scheduler.shares import Shares
from tests.engine.scheduler.simulation import LIMITS, Simulation, alone, text

ROOMY = replace(LIMITS, num_pages=400, max_batch_size=4)


def first_tokens(simulation):
    return list(simulation.tokens)


def test_one_principal_fills_the_batch_while_no_other_has_work():
    simulation = Simulation(ROOMY)
    for number in range(1, 9):
        simulation.add(text(number, principal="a"))
    simulation.turn()
    assert simulation.scheduler.stats.running == 4


def test_principals_take_turns_however_many_requests_one_has():
    simulation = Simulation(replace(ROOMY, max_batch_size=1))
    for number in range(1, 7):
        simulation.add(text(number, principal="a"))
    for number in (11, 12, 13):
        simulation.add(text(number, principal="b"))
    simulation.drain()
    assert first_tokens(simulation) == [1, 11, 2, 12, 3, 13, 4, 5, 6]


def test_turns_go_by_work_and_not_by_requests():
    simulation = Simulation(replace(ROOMY, max_batch_size=1))
    for number in range(1, 5):
        simulation.add(text(number, max_tokens=30, principal="a"))
    for number in range(11, 31):
        simulation.add(text(number, max_tokens=3, principal="b"))
    simulation.drain()
    before = first_tokens(simulation).index(3)
    assert sum(number > 10 for number in first_tokens(simulation)[:before]) >= 15


def test_weights_divide_the_work():
    simulation = Simulation(replace(ROOMY, max_batch_size=1))
    for number in range(1, 41):
        simulation.add(text(number, principal="a", weight=3.0))
    for number in range(101, 141):
        simulation.add(text(number, principal="b"))
    simulation.drain()
    served = Counter(number > 100 for number in first_tokens(simulation)[:40])
    assert served[False] == pytest.approx(30, abs=1)


def test_who_was_away_saves_up_no_claim():
    simulation = Simulation(replace(ROOMY, max_batch_size=1))
    simulation.add(text(1, principal="b"))
    for number in range(11, 31):
        simulation.add(text(number, principal="a"))
    while len(simulation.ended) < 11:
        simulation.turn()
    for number in range(101, 111):
        simulation.add(text(number, principal="b"))
    count = len(simulation.tokens)
    simulation.drain()
    later = first_tokens(simulation)[count + 1 : count + 9]
    assert sum(number > 100 for number in later) == 4


def test_a_full_batch_gives_places_to_a_principal_with_less_than_its_share():
    simulation = Simulation(ROOMY)
    specs = [text(n, max_tokens=40, principal="a") for n in range(1, 9)]
    late = [text(n, max_tokens=5, principal="b") for n in range(11, 15)]
    for spec in specs:
        simulation.add(spec)
    for _ in range(12):
        simulation.turn()
    for spec in late:
        simulation.add(spec)
    running = []
    while any(n in simulation.live for n in range(11, 15)):
        simulation.turn()
        running.append(
            Counter(s.submission.principal for s in simulation.live.values() if not s.is_waiting)[
                "b"
            ]
        )
    assert max(running) == 2, "half of four places"
    assert all(n in simulation.live for n in range(1, 5)), "none of the first answers was over"
    assert simulation.scheduler.stats.preemptions >= 2
    assert simulation.drain() == {spec.number: alone(spec, ROOMY) for spec in specs + late}


def test_a_principal_with_its_share_takes_no_place():
    simulation = Simulation(replace(ROOMY, max_batch_size=2))
    for number, principal in enumerate("abab", 1):
        simulation.add(text(number, max_tokens=20, principal=principal))
    simulation.drain()
    assert simulation.scheduler.stats.preemptions == 0


def test_the_best_priority_takes_a_place_of_its_own_principals_work():
    simulation = Simulation(ROOMY)
    specs = [text(n, max_tokens=40) for n in range(1, 7)]
    for spec in specs:
        simulation.add(spec)
    for _ in range(6):
        simulation.turn()
    urgent = text(11, priority=0)
    simulation.add(urgent)
    while 11 in simulation.live:
        simulation.turn()
    assert len(simulation.live) == 6
    assert simulation.scheduler.stats.preemptions == 1
    assert simulation.drain() == {spec.number: alone(spec, ROOMY) for spec in [*specs, urgent]}


def test_a_backlog_of_any_age_does_not_keep_the_best_priority_out():
    simulation = Simulation(replace(ROOMY, max_batch_size=1), SchedulerPolicy(aging_s=10))
    for number in range(1, 20):
        simulation.add(text(number, max_tokens=1, arrived_at=0.0))
    simulation.now = 100.0
    simulation.turn()
    simulation.add(text(20, max_tokens=1, priority=0, arrived_at=100.0))
    simulation.drain()
    assert first_tokens(simulation).index(20) <= 2


def test_the_best_priority_of_one_principal_does_not_starve_another():
    simulation = Simulation(ROOMY)
    for number in range(1, 60):
        simulation.add(text(number, max_tokens=10, priority=0, principal="a"))
    for number in range(101, 105):
        simulation.add(text(number, max_tokens=10, priority=2, principal="b"))
    while any(n in simulation.live for n in range(101, 105)):
        simulation.turn()
        simulation.now += 0.01
    assert sum(n < 100 for n in simulation.ended) < 25


def test_the_best_priority_of_a_principal_does_not_starve_its_other_requests():
    """However many requests of the best priority there are, another one loses its place a few times only."""
    simulation = Simulation(replace(ROOMY, max_batch_size=2), SchedulerPolicy(aging_s=1))
    simulation.add(text(1, max_tokens=20))
    number = 100
    while 1 in simulation.live:
        while len(simulation.live) < 5:
            number += 1
            at = simulation.now
            simulation.add(text(number, max_tokens=5, priority=0, arrived_at=at))
        simulation.turn()
        simulation.now += 0.01
        assert simulation.now < 10
    assert simulation.tokens[1] == alone(text(1, max_tokens=20), ROOMY)
    assert 1 <= simulation.scheduler.stats.preemptions <= 3


def test_prompts_of_principals_are_computed_in_turns():
    policy = SchedulerPolicy(
        budget=StepBudget(prefill_positions=5, crops=9, idle_scale=1), prefix_cache=False
    )
    simulation = Simulation(replace(ROOMY, max_batch_size=8), policy, depth=1)
    for number in range(1, 7):
        simulation.add(text(number, 4, max_tokens=1, principal="a"))
    simulation.add(text(11, 4, max_tokens=1, principal="b"))
    simulation.drain()
    assert first_tokens(simulation).index(11) <= 1


def test_shares_count_weights_exactly():
    shares = Shares(8)
    accounts = [shares.begin(str(i), 0.1 + i / 7) for i in range(50)]
    for account in accounts:
        account.num_waiting = 1
    shares.check()
    for account in accounts:
        shares.leave(account)
    shares.check()
    assert not shares.members
    alone_again = shares.begin("x", 0.01)
    shares.hold(alone_again, 8)
    assert not shares.exceeds(alone_again)
