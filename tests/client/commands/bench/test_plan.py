"""What a run plans: levels, arrivals, parts for processes; the rules that end a ramp and that call a request good."""

import itertools
import math
import random
import statistics

import pytest

from kestrel_client.commands.bench.sending.client_health import ClientHealth
from kestrel_client.commands.bench.sending.fleet import divided
from kestrel_client.commands.bench.sending.mix import Mix
from kestrel_client.commands.bench.sending.sender import Stage, arrival_times
from kestrel_client.commands.bench.stages import Limits, Ramp, Slo
from kestrel_client.commands.bench.tally import OTHER_ERRORS, Tally


@pytest.mark.parametrize(
    ("ramp", "levels"),
    [
        (Ramp("closed", 8), [8]),
        (Ramp("closed", 1, None, 12), [1, 2, 4, 8, 12]),
        (Ramp("closed", 1, 2, 6), [1, 3, 5, 6]),
        (Ramp("open", 0.5, 0.25, 1), [0.5, 0.75, 1]),
        (Ramp("open", 5, 1, 5), [5]),
    ],
)
def test_levels_rise_to_exactly_the_last(ramp, levels):
    assert list(ramp.levels()) == levels


def test_a_tiny_step_makes_a_bounded_number_of_stages():
    assert len(list(Ramp("open", 1, 1e-9, 100).levels())) == 1000


def gaps(kind, rate, seed, count):
    times = arrival_times(kind, rate, random.Random(seed))
    first = list(itertools.islice(times, count))
    return [b - a for a, b in itertools.pairwise(first)]


def test_poisson_arrivals_have_exponential_gaps_of_the_right_mean():
    found = gaps("poisson", 50, 1, 20_000)
    assert statistics.fmean(found) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(found) == pytest.approx(1 / 50, rel=0.03)  # as large as the mean
    above = sum(gap > 1 / 50 for gap in found) / len(found)
    assert above == pytest.approx(math.exp(-1), abs=0.015)
    assert found == gaps("poisson", 50, 1, 20_000) != gaps("poisson", 50, 2, 20_000)


def test_steady_arrivals_have_equal_gaps():
    assert gaps("steady", 4, 0, 100) == pytest.approx([0.25] * 99)
    assert 0 <= next(arrival_times("steady", 4, random.Random(0))) < 0.25


def stage(loop, level, most=1024):
    return Stage(loop, level, 2.0, "poisson", 0.0, 1.0, 3.0, most, "seed")


def test_processes_share_a_stage():
    parts = divided(stage("closed", 8), 3)
    assert [part.level for part in parts] == [3, 3, 2]
    assert len({part.seed for part in parts}) == 3
    assert [part.level for part in divided(stage("closed", 2), 3)] == [1, 1]
    parts = divided(stage("open", 9.0, most=100), 4)
    assert [part.level for part in parts] == [2.25] * 4 and parts[0].most_in_flight == 25
    assert parts[0].window == (1.0, 3.0)


def tally_of(*latencies, failed=0):
    tally = Tally()
    for latency in latencies:
        tally.total += 1
        tally.succeeded += 1
        tally.latency.record(latency)
        tally.ttft.record(latency / 2)
        tally.itl.record(latency / 10)
    for _ in range(failed):
        tally.fail("QUEUE_FULL")
    return tally


def test_a_stage_that_passes_a_limit_is_overloaded():
    slow = tally_of(*[0.1] * 94, *[3.0] * 6)
    assert Limits(latency_s=2).passed(slow) == ["latency p95 3000 ms > 2000 ms"]
    assert Limits(latency_s=2, percentile=90).passed(slow) == []
    assert Limits(latency_s=3, ttft_s=1.5, itl_s=0.3, errors=0).passed(slow) == []
    assert Limits(ttft_s=1.4, itl_s=0.2).passed(slow) == [
        "TTFT p95 1500 ms > 1400 ms",
        "ITL p95 300 ms > 200 ms",
    ]
    failing = tally_of(*[0.1] * 89, failed=11)
    assert Limits(errors=0.1).passed(failing) == ["errors 11.0% > 10.0%"]
    assert Limits(errors=0.11).passed(failing) == Limits().passed(failing) == []
    assert Limits(1, 1, 1, 0.5).passed(Tally()) == []


def test_a_good_request_keeps_every_limit_that_it_has():
    slo = Slo(latency_s=1.0, ttft_s=0.2, itl_s=0.05)
    assert slo.is_met(1.0, 0.2, 0.05)
    assert not slo.is_met(1.01, 0.1, 0.01)
    assert not slo.is_met(0.9, 0.21, 0.01)
    assert not slo.is_met(0.9, 0.1, 0.06)
    assert slo.is_met(0.9, None, None) and Slo().is_met(1e9, 1e9, 1e9)


def test_kinds_of_errors_are_bounded_and_tallies_add_up():
    one, two = tally_of(0.1), tally_of(0.2, failed=1)
    for i in range(100):
        one.fail(f"error {i}")
    assert len(one.errors) == 21 and one.errors[OTHER_ERRORS] == 80
    one.by_skill["query"].record(0.1)
    two.by_skill["detect"].record(0.2)
    one.merge(two)
    assert (one.total, one.succeeded, one.failed) == (103, 2, 101)
    assert one.latency.count == 2 and set(one.by_skill) == {"query", "detect"}
    assert one.errors["QUEUE_FULL"] == 1


def test_a_mix_draws_skills_by_their_shares():
    mix = Mix({"query": 3.0, "detect": 1.0}, ["what?"], ["cat", "dog"])
    rng = random.Random(0)
    drawn = [mix.draw(rng) for _ in range(2000)]
    assert {words for skill, words in drawn if skill == "detect"} == {"cat", "dog"}
    assert {words for skill, words in drawn if skill == "query"} == {"what?"}
    assert sum(skill == "query" for skill, _ in drawn) / 2000 == pytest.approx(0.75, abs=0.04)


def test_the_client_says_when_it_is_the_limit():
    health = ClientHealth(cpu_shares=[0.3, 0.2], machine_busy=1.0)
    health.lag.record(0.001, times=1000)
    on_time = tally_of(0.001).latency
    assert health.limits(on_time, 0.05, shared=False) == []
    busy = ClientHealth(cpu_shares=[0.95], machine_busy=0.2)
    busy.lag.record(0.3, times=1000)
    late = tally_of(*[0.2] * 100).latency
    assert busy.limits(late, 0.05, shared=False) == [
        "a client process used 95% of a core",
        "the client's event loop was 300 ms late (p99)",
        "requests left 200 ms after their time (p99)",
    ]
    assert len(busy.limits(on_time, 10.0, shared=False)) == 1  # 0.3 s matter little beside 10
    health.cpu_shares += [1.0] * 999
    (reason,) = health.limits(on_time, 0.05, shared=True)[1:]
    assert reason.startswith("client and server share this machine: its cores were 100% busy")
