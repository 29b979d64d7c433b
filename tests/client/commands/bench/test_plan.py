"""What is asked, which requests are good, when a stage is overloaded, and when the client is the limit."""

import random

import pytest

from kestrel_client.commands.bench.client_health import ClientHealth
from kestrel_client.commands.bench.histogram import Histogram
from kestrel_client.commands.bench.mix import Mix
from kestrel_client.commands.bench.tally import OTHER_ERRORS, Slo, Tally


def test_a_good_request_keeps_every_limit_that_it_has():
    slo = Slo(latency_s=1.0, ttft_s=0.2, itl_s=0.05)
    assert slo.is_met(1.0, 0.2, 0.05)
    assert not slo.is_met(1.01, 0.1, 0.01)
    assert not slo.is_met(0.9, 0.21, 0.01)
    assert not slo.is_met(0.9, 0.1, 0.06)
    assert slo.is_met(0.9, None, None) and Slo().is_met(1e9, 1e9, 1e9)


def test_a_stage_is_overloaded_if_more_than_a_twentieth_is_not_good():
    assert not Tally().is_overloaded
    assert not Tally(total=100, good=95).is_overloaded
    assert Tally(total=100, good=94).is_overloaded


def test_kinds_of_errors_are_bounded():
    tally = Tally(total=1, succeeded=1)
    for i in range(100):
        tally.fail(f"error {i}")
    assert len(tally.errors) == 21 and tally.errors[OTHER_ERRORS] == 80
    assert (tally.total, tally.failed) == (101, 100)


def test_a_mix_draws_skills_by_their_shares():
    mix = Mix({"query": 3.0, "detect": 1.0}, ["what?"], ["cat", "dog"])
    rng = random.Random(0)
    drawn = [mix.draw(rng) for _ in range(2000)]
    assert {words for skill, words in drawn if skill == "detect"} == {"cat", "dog"}
    assert {words for skill, words in drawn if skill == "query"} == {"what?"}
    assert sum(skill == "query" for skill, _ in drawn) / 2000 == pytest.approx(0.75, abs=0.04)


def times_of(seconds):
    times = Histogram()
    times.record(seconds, times=1000)
    return times


def test_the_client_says_when_it_is_the_limit():
    on_time, late = times_of(0.001), times_of(0.2)
    assert ClientHealth(on_time, 0.3).limits(on_time, 0.05) == []
    busy = ClientHealth(times_of(0.3), 0.95)
    assert busy.limits(late, 0.05) == [
        "the client used 95% of a core",
        "the client's event loop was 300 ms late (p99)",
        "requests left 200 ms after their time (p99)",
    ]
    assert len(busy.limits(on_time, 10.0)) == 1  # 0.3 s matter little beside 10
