"""Order, limits, chunks, pictures, preemption and rollback, one rule a test."""

from dataclasses import replace

import pytest

from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.scheduler.scheduler import Scheduler
from kestrel_engine.scheduler.sequence import Phase
from tests.engine.scheduler.simulation import LIMITS, Simulation, Spec, alone, text


def rows(simulation):
    return [row for plan in simulation.runtime.plans for row in plan.prefill + plan.decode]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_gives_what_each_gives_alone(depth):
    simulation = Simulation(depth=depth)
    specs = [text(i, i, max_tokens=1 + i % 4, image="p" if i % 2 else None) for i in range(1, 8)]
    for spec in specs:
        simulation.add(spec)
    assert simulation.drain() == {spec.number: alone(spec) for spec in specs}
    assert max(len(plan.decode) for plan in simulation.runtime.plans) > 1


def test_requests_join_in_order_of_arrival_up_to_the_batch_size():
    scheduler = Scheduler(LIMITS)
    for i in range(1, 6):
        scheduler.add(text(i, 3).submission())
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.sequence_id for row in plan.prefill] == [1, 2, 3]
    assert (scheduler.stats.running, scheduler.stats.waiting) == (3, 2)


def test_cached_prefixes_give_way_before_pages_are_used_for_the_first_time():
    simulation = Simulation(LIMITS, SchedulerPolicy(prefix_pages=12))
    for i in range(1, 30):
        simulation.add(text(i, 20 + i % 3, max_tokens=2))
        simulation.drain()
    pages = {page for row in rows(simulation) for page in row.page_table}
    assert max(pages) < 12 and simulation.scheduler.stats.pages_evictable > 4
    for i in range(30, 33):
        simulation.add(text(i, 40, max_tokens=2))
    simulation.drain()
    pages = {page for row in rows(simulation) for page in row.page_table}
    assert max(pages) > 12, "running sequences may use all"


def test_a_better_priority_goes_first_and_age_makes_up_for_it():
    simulation = Simulation(replace(LIMITS, max_batch_size=1), SchedulerPolicy(aging_s=10))
    simulation.add(text(1, 2, priority=2, arrived_at=0))
    simulation.add(text(2, 2, priority=1, arrived_at=5))
    simulation.add(text(3, 2, priority=0, arrived_at=11))
    simulation.now = 12
    simulation.drain()
    assert list(simulation.tokens) == [3, 2, 1]
    simulation = Simulation(replace(LIMITS, max_batch_size=1), SchedulerPolicy(aging_s=10))
    simulation.add(text(1, 2, priority=2, arrived_at=0))
    simulation.add(text(2, 2, priority=0, arrived_at=21))
    simulation.now = 22
    simulation.drain()
    assert list(simulation.tokens) == [1, 2]


def test_a_deadline_drops_what_waits_before_anything_is_computed():
    simulation = Simulation(replace(LIMITS, max_batch_size=1))
    simulation.add(text(1, 2, max_tokens=5))
    simulation.add(text(2, 2, deadline_at=3.0))
    simulation.now = 2.9
    simulation.turn()
    assert 2 in simulation.live
    simulation.now = 3.0
    simulation.drain()
    assert 2 in simulation.ended
    assert {row.sequence_id for row in rows(simulation)} == {1}


def test_a_deadline_means_nothing_once_a_request_runs():
    simulation = Simulation()
    simulation.add(text(1, 2, max_tokens=5, deadline_at=3.0))
    simulation.turn()
    simulation.now = 9.0
    assert len(simulation.drain()[1]) == 5


def test_long_text_is_prefilled_in_chunks_while_others_decode():
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=8, crops=2, idle_scale=1))
    simulation = Simulation(policy=policy)
    simulation.add(text(1, 2, max_tokens=12))
    simulation.turn()
    long = text(2, 40, max_tokens=2)
    simulation.add(long)
    assert simulation.drain() == {1: alone(text(1, 2, max_tokens=12)), 2: alone(long)}
    chunks = [
        row for plan in simulation.runtime.plans for row in plan.prefill if row.sequence_id == 2
    ]
    assert [len(row.tokens) for row in chunks] == [8] * 5 + [1] or len(chunks) >= 5
    assert all(len(row.tokens) <= 8 for row in chunks)
    assert [row.sample is not None for row in chunks[:-1]] == [False] * (len(chunks) - 1)
    decoding = [plan for plan in simulation.runtime.plans if plan.prefill and plan.decode]
    assert decoding


def test_an_image_prefix_stays_whole_and_its_crops_are_spread():
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=4, crops=3, idle_scale=1))
    simulation = Simulation(policy=policy)
    spec = text(1, 6, image="p", crops=7)
    simulation.add(spec)
    assert simulation.drain()[1] == alone(spec)
    pieces = [piece for plan in simulation.runtime.plans for piece in plan.encode]
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 3), (3, 6), (6, 7)]
    first = next(row for row in rows(simulation))
    assert first.start == 0
    assert len(first.tokens) >= 2


def test_after_taking_on_much_a_few_steps_only_decode():
    budget = StepBudget(prefill_positions=8, crops=2, idle_scale=1, pause=3)
    simulation = Simulation(replace(LIMITS, max_batch_size=4), SchedulerPolicy(budget=budget))
    simulation.add(text(1, 2, max_tokens=16))
    simulation.turn()
    for number in (2, 3):
        simulation.add(text(number, 8, max_tokens=3))
    specs = [text(1, 2, max_tokens=16), *(text(number, 8, max_tokens=3) for number in (2, 3))]
    assert simulation.drain() == {spec.number: alone(spec) for spec in specs}
    took = [bool(plan.prefill) for plan in simulation.runtime.plans]
    # Beside one row and with one more who waits the pause is half of three; with nobody it is all of two thirds.
    assert took[:4] == [True, True, False, True]
    assert took[4:6] == [False, False]


def test_nobody_pauses_while_nobody_decodes():
    budget = StepBudget(prefill_positions=8, crops=2, idle_scale=1, pause=100)
    simulation = Simulation(policy=SchedulerPolicy(budget=budget))
    for number in (1, 2, 3):
        simulation.add(text(number, 8, max_tokens=1))
    simulation.drain()
    assert [len(plan.prefill) for plan in simulation.runtime.plans if plan.prefill] == [1, 1, 1]


def test_images_and_text_take_turns():
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=20, crops=1, idle_scale=1))
    simulation = Simulation(replace(LIMITS, max_batch_size=6), policy, depth=1)
    simulation.add(text(1, 2, max_tokens=20))
    simulation.turn()
    for i in range(2, 5):
        simulation.add(text(i, 2, image=f"p{i}", crops=5, max_tokens=1))
    simulation.turn()
    simulation.add(text(9, 3, max_tokens=1))
    for _ in range(4):
        simulation.turn()
    assert 9 in simulation.ended


def test_a_image_is_encoded_and_its_prefix_computed_once_for_all_who_ask():
    simulation = Simulation(replace(LIMITS, max_batch_size=8, num_pages=80))
    specs = [text(i, 3, image="p", max_tokens=2) for i in range(1, 7)]
    for spec in specs:
        simulation.add(spec)
    assert simulation.drain() == {spec.number: alone(spec) for spec in specs}
    assert sum(len(plan.encode) for plan in simulation.runtime.plans) == 1
    assert sum(row.start == 0 for row in rows(simulation)) == 1
    assert simulation.scheduler.stats.cached_positions == 5 * 10


def test_those_who_wait_for_a_image_are_not_lost_when_its_first_request_goes():
    for end in ("abort", "fail"):
        simulation = Simulation(depth=1)
        for i in (1, 2, 3):
            simulation.add(text(i, 3, image="p", crops=30, max_tokens=2))
        simulation.turn()
        simulation.abort(1)
        if end == "fail":
            simulation.turn(fail=True)
        simulation.drain()
        assert {2, 3} <= simulation.ended | simulation.failed


def test_generated_tokens_serve_a_follow_up():
    simulation = Simulation()
    first = text(1, 4, max_tokens=12)
    simulation.add(first)
    answer = simulation.drain()[1]
    follow = Spec(2, (*first.text, *answer, 77))
    simulation.add(follow)
    assert simulation.drain()[2] == alone(follow)
    start = next(row.start for row in rows(simulation) if row.sequence_id == 2)
    # BOS, 4 and 11 of the 12 generated tokens were fed: 16 positions, 3 whole pages.
    assert start == 15


def test_embeddings_outlive_their_pages():
    simulation = Simulation(replace(LIMITS, num_pages=13))
    simulation.add(text(1, 2, image="p", max_tokens=1))
    simulation.drain()
    simulation.add(text(2, 40, max_tokens=20))
    simulation.drain()
    again = text(3, 3, image="p")
    simulation.add(again)
    assert simulation.drain()[3] == alone(again)
    assert next(row.start for row in rows(simulation) if row.sequence_id == 3) == 0
    assert sum(len(plan.encode) for plan in simulation.runtime.plans) == 1


def test_embeddings_kept_are_bounded():
    simulation = Simulation(policy=SchedulerPolicy(kept_embeddings=2))
    for i in range(1, 8):
        simulation.add(text(i, 2, image=f"p{i}", max_tokens=1))
    simulation.drain()
    assert dropped(simulation) == ["p1", "p2", "p3", "p4"]
    # No step is made to drop an image only, so p5 waits for the next one.
    simulation.add(text(8, 2, max_tokens=1))
    simulation.drain()
    assert dropped(simulation) == ["p1", "p2", "p3", "p4", "p5"]


def test_a_flush_drops_embeddings_at_once():
    simulation = Simulation()
    simulation.add(text(1, 2, image="p1", max_tokens=1))
    simulation.drain()
    assert dropped(simulation) == []
    simulation.scheduler.flush()
    assert simulation.scheduler.has_work
    simulation.drain()
    assert dropped(simulation) == ["p1"]
    assert not simulation.scheduler.has_work


def dropped(simulation: Simulation) -> list[str]:
    return [key for plan in simulation.runtime.plans for key in plan.drop_images]


def test_when_pages_run_out_the_youngest_of_the_least_priority_is_preempted_and_nothing_is_lost():
    limits = replace(LIMITS, num_pages=12, max_batch_size=3)
    simulation = Simulation(limits)
    specs = [
        text(1, 6, max_tokens=30, priority=1, arrived_at=0),
        text(2, 6, max_tokens=30, priority=2, arrived_at=1),
        text(3, 6, max_tokens=30, priority=1, arrived_at=2),
    ]
    for spec in specs:
        simulation.add(spec)
    assert simulation.drain() == {spec.number: alone(spec) for spec in specs}
    assert simulation.scheduler.stats.preemptions > 0
    ends = {row.sequence_id: n for n, row in enumerate(rows(simulation))}
    assert ends[1] < ends[3] < ends[2]


def test_what_can_never_fit_is_known_beforehand():
    scheduler = Scheduler(LIMITS)
    assert scheduler.fits(30, 31)
    assert not scheduler.fits(30, 32)
    assert not Scheduler(replace(LIMITS, num_pages=2)).fits(9, 3)
    with pytest.raises(AssertionError, match="fits"):
        scheduler.add(text(1, 59, max_tokens=10).submission())


def test_abort_frees_in_every_phase_within_two_steps():
    for depth in (1, 2):
        simulation = Simulation(depth=depth)
        for i in range(1, 6):
            simulation.add(text(i, 6, image="p" if i == 2 else None, crops=30, max_tokens=20))
        for _ in range(3):
            simulation.turn()
        sequences = dict(simulation.live)
        for number in list(sequences):
            simulation.abort(number)
            simulation.abort(number)
        assert simulation.scheduler.stats.running == simulation.scheduler.stats.waiting == 0
        for _ in range(2):
            simulation.turn()
        simulation.drain()
        assert not simulation.scheduler.has_work
        stats = simulation.scheduler.stats
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert {item.phase for item in sequences.values()} == {Phase.FINISHED}


def test_a_row_launched_for_a_request_that_had_ended_is_dropped():
    simulation = Simulation(depth=2)
    simulation.add(text(1, 3, max_tokens=10, stops_at=3))
    assert len(simulation.drain()[1]) == 3
    assert len(rows(simulation)) == 4


def test_a_rule_that_must_wait_costs_its_row_a_step_and_the_batch_nothing():
    simulation = Simulation(depth=2)
    waiting = text(1, 3, max_tokens=8, waits_at=frozenset(range(1, 8)))
    simulation.add(waiting)
    simulation.add(text(2, 3, max_tokens=8))
    assert simulation.drain() == {1: alone(waiting), 2: alone(text(2, 3, max_tokens=8))}
    with_both = [len(plan.decode) for plan in simulation.runtime.plans]
    assert with_both.count(2) >= 3
    assert [row.sample.draw for row in rows(simulation) if row.sequence_id == 1] == list(range(8))


def test_a_failed_step_ends_its_sequences_and_no_others():
    simulation = Simulation(depth=1)
    for i in range(1, 6):
        simulation.add(text(i, 4, image="p" if i < 3 else None))
    simulation.turn(fail=True)
    assert simulation.failed
    survivors = set(range(1, 6)) - simulation.failed
    simulation.drain()
    for number in survivors:
        assert simulation.tokens[number] == alone(simulation.specs[number])


def test_a_row_that_is_not_finite_ends_its_sequence_and_no_others():
    simulation = Simulation(depth=2)
    specs = [text(i, 7, max_tokens=6) for i in (1, 2, 3)]
    for spec in specs:
        simulation.add(spec)
    while len(simulation.tokens.get(2, [])) < 3:
        simulation.turn()
    simulation.runtime.bad_sequences.add(2)
    tokens = simulation.drain()
    assert simulation.not_finite == {2}
    assert {1: tokens[1], 3: tokens[3]} == {spec.number: alone(spec) for spec in specs[::2]}
    assert tokens[2] == alone(specs[1])[: len(tokens[2])]


def test_the_pages_that_a_bad_row_wrote_leave_the_prefix_cache_and_those_of_others_stay():
    shared, own = tuple(range(100, 114)), tuple(range(200, 210))
    simulation = Simulation(depth=1)
    simulation.add(Spec(1, shared))
    simulation.drain()
    cached = simulation.scheduler.stats.pages_cached
    assert cached == 3
    # Its first chunk is good and cached at once; it is bad only when it decodes.
    bad = Spec(2, shared + own, max_tokens=9)
    simulation.add(bad)
    while len(simulation.tokens.get(2, [])) < 3:
        simulation.turn()
    assert simulation.scheduler.stats.pages_cached == 5
    simulation.runtime.bad_sequences.add(2)
    simulation.drain()
    assert simulation.not_finite == {2}
    assert simulation.scheduler.stats.pages_cached == cached
    before = simulation.scheduler.stats.cached_positions
    again = Spec(3, shared + own, max_tokens=9)
    simulation.add(again)
    assert simulation.drain()[3] == alone(again)
    assert simulation.scheduler.stats.cached_positions - before == 15, "what 1 wrote"


def test_one_who_has_taken_over_pages_that_leave_the_cache_keeps_them():
    simulation = Simulation(depth=1)
    first, second = (Spec(i, tuple(range(100, 112)), max_tokens=12) for i in (1, 2))
    simulation.add(first)
    while not simulation.tokens.get(1):
        simulation.turn()
    simulation.add(second)
    while not simulation.tokens.get(2):
        simulation.turn()
    assert simulation.scheduler.stats.cached_positions == 10
    simulation.runtime.bad_sequences.add(1)
    simulation.turn()
    assert simulation.not_finite == {1}
    assert simulation.drain()[2] == alone(second)
    assert simulation.scheduler.stats.pages_cached == 0


def test_pages_that_left_the_cache_stay_out_while_several_sequences_hold_them():
    limits = replace(LIMITS, num_pages=10)
    simulation = Simulation(limits, depth=1)
    # One prefix. The third sequence still holds it when the second one ends.
    specs = [Spec(i, tuple(range(100, 112)), max_tokens=n) for i, n in ((1, 12), (2, 3), (3, 12))]
    for spec in specs:
        simulation.add(spec)
        while not simulation.tokens.get(spec.number):
            simulation.turn()
    assert simulation.scheduler.stats.cached_positions == 20
    simulation.runtime.bad_sequences.add(1)
    while 2 not in simulation.ended:
        simulation.turn()
    assert simulation.not_finite == {1} and 3 not in simulation.ended
    assert simulation.scheduler.stats.pages_cached == 0
    # Pages that the third one holds don't count as free for the fourth one.
    simulation.add(text(4, 30))
    tokens = simulation.drain()
    assert tokens[3] == alone(specs[2]) and tokens[4] == alone(simulation.specs[4])


def test_an_image_whose_embedding_is_not_finite_fails_those_who_ask_about_it_and_is_encoded_anew():
    simulation = Simulation(replace(LIMITS, max_batch_size=6, num_pages=80))
    simulation.spoil_image("p")
    for i, image in enumerate(["p", "q", None, "p"], start=1):
        simulation.add(text(i, 4, image=image))
    tokens = simulation.drain()
    # The second one about it waited for the first one's prefix, and gets an embedding of its own.
    assert simulation.not_finite == {1}
    assert tokens[2] == alone(simulation.specs[2]) and tokens[3] == alone(simulation.specs[3])
    assert tokens[4] == alone(simulation.specs[4])
    encoded = [p.image.key for plan in simulation.runtime.plans for p in plan.encode if not p.first]
    assert sorted(encoded) == ["p", "p", "q"]


def test_a_prefix_that_is_not_finite_ends_its_sequence_before_it_samples():
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=4, crops=4, idle_scale=1))
    simulation = Simulation(policy=policy)
    simulation.runtime.bad_sequences.add(1)
    simulation.add(text(1, 20))
    simulation.add(text(2, 5))
    assert simulation.drain().keys() == {2}
    assert simulation.not_finite == {1}
    fed = [row for row in rows(simulation) if row.sequence_id == 1]
    assert len(fed) <= 2, "the first chunk, and what was launched before it came back"
