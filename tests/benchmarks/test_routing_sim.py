"""The simulation of routing: its ring, its caches, and what must hold for every choice."""

from __future__ import annotations

import random
import re

import pytest

from benchmarks.routing_sim import (
    CHOICES,
    SCENARIOS,
    Replicas,
    Ring,
    Times,
    bounded_ring,
    main,
    ring_hash,
    session_trace,
    simulate,
    zipf_trace,
)

TIMES = Times(miss_s=0.0146, hit_s=0.0038, alone_miss_s=0.0306, alone_hit_s=0.0079, images=40)
RNG = random.Random(0)


def moves(num_before, places_before, num_after, places_after):
    """Of 4000 images, those that move when the replicas become more, and to where."""
    before = Ring(list(range(num_before)), places_before)
    after = Ring(list(range(num_after)), places_after)
    pairs = ((next(before.walk(image)), next(after.walk(image))) for image in range(4000))
    return [new for old, new in pairs if old != new]


def test_a_replica_that_joins_takes_its_share_and_moves_nothing_else():
    moved = moves(10, 4000, 11, 4400)
    assert set(moved) == {10} and len(moved) / 4000 == pytest.approx(1 / 11, abs=0.02)
    # gRPC's ring has a fixed size, so the others lose a few places.
    assert len(moves(10, 4096, 11, 4096)) / 4000 < 0.2


def test_the_bound_holds_whatever_is_asked():
    replicas, ring = Replicas(TIMES, 5, 5), Ring(list(range(5)), 500)
    for n in range(50):
        replicas.take(bounded_ring(replicas, ring, 0.0, 7, RNG), 0.0, 0.0, 7)
        assert max(replicas.in_flight) <= 1.5 * (n + 1) / 5 + 1
    first = next(ring.walk(7))
    assert ring_hash(replicas, ring, 0.0, 7, RNG) == first
    assert replicas.in_flight[first] == max(replicas.in_flight)


def test_a_cache_keeps_what_was_used_last_and_dies_with_its_replica():
    replicas = Replicas(TIMES, 2, 2)
    for image in [*range(40), 0, 40]:
        replicas.take(0, 0.0, 0.0, image)
    assert replicas.holders[0] == {0} and replicas.holders[1] == set()
    end_s, is_hit = replicas.take(0, 100.0, 100.0, 0)
    assert is_hit and end_s == pytest.approx(100.0079)
    replicas.finish_until(99.0)
    assert replicas.in_flight == [1, 0]
    assert replicas.kill(0) == [(100.0, 0)]
    assert replicas.in_flight == [0, 0] and replicas.total_in_flight == 0
    assert not any(replicas.holders.values())
    replicas.finish_until(200.0)
    assert replicas.total_in_flight == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", CHOICES)
def test_every_request_ends(name, scenario):
    trace = zipf_trace(2000, 300, 600.0, 0.9, random.Random(1))
    found = simulate(trace, CHOICES[name], 10, TIMES, scenario)
    assert 0 < found.hit_rate < 1 and found.spread >= 1
    assert TIMES.alone_hit_s <= found.p50_s <= found.p99_s < 60
    assert (found.lost > 0) <= (scenario == "failures")


def test_choices_by_the_image_hit_more_and_the_bound_keeps_the_tail_short():
    trace = session_trace(4000, 5.0, 1.0, 700.0, random.Random(2))
    found = {name: simulate(trace, choice, 10, TIMES) for name, choice in CHOICES.items()}
    for name in ("ring hash", "bounded ring", "prefix-aware"):
        assert found[name].hit_rate > found["random"].hit_rate + 0.1
    hot = zipf_trace(4000, 300, 900.0, 1.2, random.Random(2))
    ring, bounded = (simulate(hot, CHOICES[n], 10, TIMES) for n in ("ring hash", "bounded ring"))
    assert bounded.spread < ring.spread and bounded.p99_s < ring.p99_s


@pytest.mark.parametrize(
    "flags", [["--replicas", "10", "0"], ["--requests-per-replica", "0"], ["--load", "nan"]]
)
def test_numbers_that_cannot_be_are_refused(monkeypatch, capsys, flags):
    monkeypatch.setattr("sys.argv", ["routing_sim", *flags])
    with pytest.raises(SystemExit):
        main()
    assert re.search(rf"{flags[0]}=\S+: must be above 0", capsys.readouterr().err)
