"""What is computed from the calls of a run in which processes are killed."""

import pytest

from benchmarks.service.kills import p99_after
from benchmarks.traffic.mixed_calls import Ended


def ended(began: float, seconds: float) -> Ended:
    return Ended(kind="query", began=began, ended=began + seconds)


def test_a_call_belongs_to_the_second_after_the_kill_before_it():
    calls = [
        ended(9.5, 9.0),
        ended(10.2, 0.1),
        ended(11.7, 0.2),
        ended(20.9, 0.3),
        ended(36.0, 5.0),
    ]
    found = p99_after(calls, [10.0, 20.0], 15.0, 1.0)
    assert [(at, count) for at, count, _ in found] == [(0.0, 2), (1.0, 1)]
    assert [p99 for *_, p99 in found] == pytest.approx([0.3, 0.2])
    (whole,) = p99_after(calls, [10.0, 20.0], 15.0, 5.0)
    assert whole == (0.0, 3, pytest.approx(0.3))
