"""Pace: decode steps at intervals, and launches of new work between them."""

from kestrel_engine.steps.pace import LOOK_S, Pace
from kestrel_engine.types.step import Lane, StepPlan

DECODE, NEW_WORK = StepPlan(1, lane=Lane.DECODE), StepPlan(2, lane=Lane.NEW_WORK)


def test_without_a_pace_every_step_is_due():
    pace = Pace(0.0)
    pace.launched(DECODE, 1.0, 1.001)
    assert not pace.is_set
    assert pace.until_due(1.0) == 0.0


def test_the_next_decode_step_is_due_after_the_pace():
    pace = Pace(0.012)
    pace.launched(DECODE, 1.0, 1.001)
    assert pace.until_due(1.001) == LOOK_S
    assert 0.0 < pace.until_due(1.0119) < LOOK_S
    assert pace.until_due(1.0121) == 0.0


def test_new_work_is_launched_only_if_that_ends_before_the_next_decode_step():
    pace = Pace(0.012)
    pace.launched(NEW_WORK, 0.0, 0.006)
    pace.launched(DECODE, 1.0, 1.001)
    assert pace.has_time(1.0059)
    assert not pace.has_time(1.0061)
    assert not pace.has_time(1.02)


def test_long_launches_are_forgotten_and_never_keep_new_work_back_for_ever():
    pace = Pace(0.012)
    pace.launched(NEW_WORK, 0.0, 5.0)
    pace.launched(DECODE, 10.0, 10.001)
    assert pace.has_time(10.001)
    assert not pace.has_time(10.004)
    for _ in range(100):
        pace.launched(NEW_WORK, 0.0, 0.001)
    assert pace.has_time(10.0105)
