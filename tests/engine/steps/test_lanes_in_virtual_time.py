"""The trace in virtual time: what the policy of two lanes gives and costs on the model of a card."""

import pytest

from tests.engine.steps.lanes_in_virtual_time import Card, policy_for, simulate, summary

POLICY = policy_for(15.0)


@pytest.mark.parametrize("in_flight", [64, 16])
def test_decoding_beside_images_keeps_the_rate_and_the_gaps_short(in_flight):
    run = {"in_flight": in_flight, "tokens": 20, "requests": 200}
    one, two = (
        summary(simulate(Card(), POLICY, beside=beside, **run), in_flight)
        for beside in (False, True)
    )
    assert two["requests/s"] > 0.95 * one["requests/s"]
    assert two["gap p95"] < 0.6 * one["gap p95"]
    # A sequence whose prompt has been computed joins the second decode step that ends.
    assert two["gap p99"] < 26


def test_smaller_steps_shorten_the_gaps_and_cost_requests():
    run = {"in_flight": 64, "tokens": 20, "requests": 200, "beside": True}
    whole = summary(simulate(Card(), POLICY, **run), 64)
    small = summary(simulate(Card(), policy_for(7.5), **run), 64)
    assert small["gap p95"] < 0.8 * whole["gap p95"]
    assert 0.85 * whole["requests/s"] < small["requests/s"] < 0.97 * whole["requests/s"]


def test_a_second_run_gives_the_same():
    run = {"in_flight": 4, "tokens": 5, "requests": 20, "beside": True}
    first, second = (simulate(Card(), POLICY, **run) for _ in range(2))
    assert first == second
