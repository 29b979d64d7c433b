"""How many functions the step thread calls for one row of a decode step. Each costs every token of every request."""

import sys

from benchmarks.engine_host import PAGE_SIZE, CountingOutput, NullRuntime, limits_for, loop_with
from kestrel_engine.steps.delivery import DeliveryThread


def calls(num_rows: int) -> list[int]:
    """The calls in each of some consecutive decode steps of ``num_rows`` rows. In one of them, each row gets a page."""
    delivery = DeliveryThread(lambda deliveries: None, lambda number: None)
    runtime = NullRuntime(limits_for(num_rows, 100), num_rows)
    loop = loop_with(runtime, delivery, num_rows, 100)
    counts = []

    def profile(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    while len(runtime.before_launch) < 5:
        assert loop.turn()
    for _ in range(PAGE_SIZE):
        counts.append(0)
        sys.setprofile(profile)
        try:
            assert loop.turn()
        finally:
            sys.setprofile(None)
    return counts


def test_a_row_and_a_page_for_it_cost_few_calls(monkeypatch):
    monkeypatch.setattr(CountingOutput, "num_delivered", 10**9)
    one, nine = sorted(calls(1)), sorted(calls(9))
    assert one[-1] > one[-2], "a row gets a page once in so many steps"
    a_row, with_a_page = (nine[-2] - one[-2]) / 8, (nine[-1] - one[-1]) / 8
    assert 25 < a_row <= 35
    assert with_a_page - a_row <= 8
