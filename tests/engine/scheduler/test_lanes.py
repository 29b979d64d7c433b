"""Two lanes: decode steps beside steps of new work (types.step.Lane). test_random.py runs them at random, too."""

from dataclasses import replace

import pytest

from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.lanes import beside
from kestrel_engine.scheduler.lanes.beside import SPACING, Beside, StepLoad
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.scheduler.sequence import Sequence
from kestrel_engine.types.step import Lane
from tests.engine.scheduler.simulation import LIMITS, Simulation, alone, text

BESIDE = replace(LIMITS, decodes_beside=True, num_pages=60)
LONG = SchedulerPolicy(itl_target_s=-1.0)
"""All steps of new work count as long."""


def launch(simulation, lane):
    """Launches a step of ``lane``, as ``turn`` does, and collects nothing."""
    plan = simulation.scheduler.schedule(simulation.now, lane)
    if plan is not None:
        simulation.runtime.launch(plan)
        simulation.out[lane].append(plan)
        for row in plan.prefill + plan.decode:
            if row.sample is not None:
                simulation.resume(row.sequence_id, ahead=True)
    simulation.check()
    return plan


def decoding(simulation, *specs):
    """Adds requests and computes their prompts, so that they decode."""
    for spec in specs:
        simulation.add(spec)
    assert launch(simulation, Lane.NEW_WORK).prefill
    simulation.collect(False, Lane.NEW_WORK)


def test_tokens_come_while_a_long_step_of_new_work_is_out():
    simulation = Simulation(BESIDE, LONG, depth=3)
    decoding(simulation, text(1, 4, max_tokens=20))
    simulation.add(text(2, 4, max_tokens=3, image="p"))
    new_work = launch(simulation, Lane.NEW_WORK)
    assert new_work.encode and new_work.prefill and not new_work.decode
    for _ in range(5):
        step = launch(simulation, Lane.DECODE)
        assert [row.sequence_id for row in step.decode] == [1] and step.after is None
        simulation.collect(False, Lane.DECODE)
    assert len(simulation.tokens[1]) == 6 and 2 not in simulation.tokens
    simulation.collect(False, Lane.NEW_WORK)
    tokens = simulation.drain()
    assert all(tokens[number] == alone(simulation.specs[number]) for number in (1, 2))


def test_a_short_step_of_new_work_runs_before_the_next_decode_step_and_its_rows_join():
    simulation = Simulation(BESIDE, depth=3)
    decoding(simulation, text(1, 4, max_tokens=20))
    simulation.add(text(2, 4, max_tokens=3))
    new_work = launch(simulation, Lane.NEW_WORK)
    step = launch(simulation, Lane.DECODE)
    assert step.after == new_work.step_id
    assert [row.sequence_id for row in step.decode] == [1, 2]
    # The lane runs in order, so the next step need not wait for the same step again.
    again = launch(simulation, Lane.DECODE)
    assert again.after is None and len(again.decode) == 2
    assert simulation.drain()[2] == alone(simulation.specs[2])


def test_without_other_rows_the_first_tokens_are_launched_behind_the_prompt():
    simulation = Simulation(BESIDE, LONG, depth=3)
    simulation.add(text(1, 4, max_tokens=3))
    new_work = launch(simulation, Lane.NEW_WORK)
    assert launch(simulation, Lane.DECODE).after == new_work.step_id
    # The lane runs in order, so the next step need not wait again.
    assert launch(simulation, Lane.DECODE).after is None
    assert launch(simulation, Lane.DECODE) is None
    assert simulation.drain()[1] == alone(simulation.specs[1])


@pytest.mark.parametrize("other", [False, True])
def test_pages_that_a_step_writes_are_kept_until_it_has_come_back(other):
    """The sequence ends while its prompt is computed; another one needs its pages at once."""
    simulation = Simulation(replace(BESIDE, num_pages=7), LONG, depth=3)
    decoding(simulation, text(1, 4, max_tokens=20))
    simulation.add(text(2, 14, max_tokens=2))
    launch(simulation, Lane.NEW_WORK)
    free = simulation.scheduler.stats.pages_free
    simulation.abort(2)
    assert simulation.scheduler.stats.pages_free == free
    assert simulation.scheduler.stats.running == 1
    if other:
        simulation.add(text(3, 14, max_tokens=2))
        assert launch(simulation, Lane.NEW_WORK) is None
    for _ in range(4):
        launch(simulation, Lane.DECODE)
        simulation.collect(False, Lane.DECODE)
    simulation.collect(False, Lane.NEW_WORK)
    assert simulation.scheduler.stats.pages_free > free
    tokens = simulation.drain()
    assert all(tokens[i] == alone(simulation.specs[i]) for i in ((1, 3) if other else (1,)))


def test_a_sequence_whose_prompt_is_out_is_not_preempted():
    simulation = Simulation(replace(BESIDE, num_pages=5), LONG, depth=3)
    decoding(simulation, text(1, 4, max_tokens=16))
    simulation.add(text(2, 9, max_tokens=8))
    launch(simulation, Lane.NEW_WORK)
    for _ in range(7):  # One page is free, then there is none for its next token.
        if launch(simulation, Lane.DECODE) is None:
            break
        simulation.collect(False, Lane.DECODE)
    assert simulation.scheduler.stats.preemptions == 0
    simulation.collect(False, Lane.NEW_WORK)
    tokens = simulation.drain()
    assert all(tokens[number] == alone(simulation.specs[number]) for number in (1, 2))


def is_waited_for(lane: Beside) -> bool:
    """Whether a decode step of other rows waits for the step of new work that is out."""
    other = Sequence(text(1, 4).submission(), LIMITS.page_size)
    return lane.choose([other], [other])[1] is not None


def test_the_time_of_new_work_is_learnt_from_steps_that_ran_alone():
    lane = Beside(itl_target_s=0.015)
    lane.launched_new_work(0, StepLoad(1.0, 20))
    assert is_waited_for(lane), "nothing is known yet"
    lane.launched(0)
    lane.ended(0, 0.060)
    lane.launched_new_work(1, StepLoad(1.0, 20))
    assert not is_waited_for(lane)
    lane.launched(None)
    lane.ended(1, 5.0)  # It ran beside decode steps, so its time says nothing.
    lane.launched_new_work(2, StepLoad(0.2, 20))
    assert is_waited_for(lane)
    lane.launched(2)
    lane.ended(2, None)
    lane.launched_new_work(3, StepLoad(0.5, 20))
    assert not is_waited_for(lane)
    lane.ended(3, None)
    lane.launched_new_work(4, StepLoad(0.5, 4))
    assert is_waited_for(lane), "few rows wait longer"


def test_decoding_does_not_wait_for_a_short_step_behind_a_long_one():
    """It would wait for both."""
    lane = Beside(itl_target_s=0.015)
    lane.launched_new_work(0, StepLoad(1.0, 20))
    lane.launched(0)
    lane.ended(0, 0.060)
    lane.launched_new_work(1, StepLoad(1.0, 20))
    lane.launched_new_work(2, StepLoad(0.2, 20))
    assert not is_waited_for(lane) and lane.is_beside
    lane.launched(None)
    lane.ended(1, 0.060)
    assert is_waited_for(lane) and not lane.is_beside
    lane.launched(2)
    assert not is_waited_for(lane) and not lane.is_beside


def test_long_steps_leave_room_while_many_sequences_wait():
    lane = Beside(itl_target_s=0.015, room=True)
    lane.launched_new_work(0, StepLoad(1.0, 20, 50))
    assert lane.spacing_s == 0, "nothing is known yet"
    lane.launched(0)
    lane.ended(0, 0.060)
    short, long = StepLoad(0.2, 20, 50), StepLoad(1.0, 20, 50)
    assert lane.leaves_room(long) and not lane.leaves_room(short)
    assert not lane.leaves_room(long._replace(num_waiting=3)), "the device would be idle"
    assert not lane.leaves_room(long._replace(num_decoding=2)), "they take little of the device"
    lane.launched_new_work(1, long)
    assert lane.spacing_s == pytest.approx(SPACING * 0.015)
    lane.launched(None)
    lane.launched_new_work(2, long._replace(num_waiting=3))
    assert lane.spacing_s == pytest.approx(SPACING * 0.015), "the older one runs"
    lane.ended(1, 0.060)
    assert lane.spacing_s == 0
    other = Beside(itl_target_s=0.015)
    other.launched_new_work(0, long)
    other.ended(0, 0.060)
    assert not other.is_short(long) and not other.leaves_room(long), "this device can't"


def test_a_long_step_is_told_to_leave_room_and_the_decode_steps_beside_it_are_spaced(monkeypatch):
    monkeypatch.setattr(beside, "MANY_DECODING", 1)
    monkeypatch.setattr(beside, "MANY_WAITING", 1)
    monkeypatch.setattr(Beside, "is_short", lambda self, load: False)
    policy = SchedulerPolicy(budget=StepBudget(prefill_positions=4))
    simulation = Simulation(replace(BESIDE, leaves_room=True), policy, depth=3)
    decoding(simulation, text(1, 4, max_tokens=20))
    assert launch(simulation, Lane.DECODE).spacing_s == 0
    simulation.collect(False, Lane.DECODE)
    for number in (2, 3):
        simulation.add(text(number, 4, max_tokens=3))
    assert launch(simulation, Lane.NEW_WORK).leave_room, "one more waits"
    step = launch(simulation, Lane.DECODE)
    assert step.after is None and step.spacing_s == pytest.approx(SPACING * policy.itl_target_s)
    simulation.collect(False, Lane.NEW_WORK)
    assert not launch(simulation, Lane.NEW_WORK).leave_room, "none waits"
    assert launch(simulation, Lane.DECODE).spacing_s == 0
    tokens = simulation.drain()
    assert all(tokens[number] == alone(simulation.specs[number]) for number in (1, 2, 3))
