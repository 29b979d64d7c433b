"""Repeated refusals of a caller are delayed, within bounds; those of other callers are not."""

import asyncio

import pytest

from kestrel_grpc.security.admission import refusal_pace
from kestrel_grpc.security.admission.refusal_pace import (
    AT_ONCE,
    LONGEST_S,
    MOST_OF_ONE,
    RATE,
    RefusalPace,
)


class Waits:
    """Takes the place of asyncio. ``delays``: the seconds of each sleep, none of which passes."""

    def __init__(self, monkeypatch, clock):
        self.advance, self.delays = clock.advance, []
        monkeypatch.setattr(refusal_pace, "asyncio", self)

    async def sleep(self, seconds):
        self.delays.append(seconds)


@pytest.fixture
def waits(monkeypatch, still_clock):
    return Waits(monkeypatch, still_clock)


async def refuse(pace, count, who="a", left_s=None):
    for _ in range(count):
        await pace.delay(who, left_s)


async def test_a_few_refusals_are_answered_at_once(waits):
    pace = RefusalPace()
    await refuse(pace, AT_ONCE)
    for _ in range(100):
        waits.advance(1 / RATE)
        await refuse(pace, 1)
    assert not waits.delays


async def test_further_ones_come_at_the_rate_and_at_most_so_late(waits):
    pace = RefusalPace()
    await refuse(pace, AT_ONCE + 1000)
    assert waits.delays[-1] == max(waits.delays) == pytest.approx(LONGEST_S)
    spaced = [delay for delay in waits.delays if 0.01 < delay < 0.99 * LONGEST_S]
    assert spaced == pytest.approx([(i + 1) / RATE for i in range(len(spaced))])
    assert len(spaced) == pytest.approx(LONGEST_S * RATE, abs=2)
    waits.delays.clear()
    await refuse(pace, 1, who="b")
    assert not waits.delays, "another caller"
    waits.advance(LONGEST_S + AT_ONCE / RATE)
    await refuse(pace, AT_ONCE)
    assert not waits.delays, "the caller has waited"


async def test_a_delay_takes_at_most_half_of_the_time_that_is_left(waits):
    pace = RefusalPace()
    await refuse(pace, AT_ONCE + 1000, left_s=0.4)
    assert max(waits.delays) == pytest.approx(0.2)
    waits.delays.clear()
    await refuse(pace, 1, left_s=0.0)
    assert not waits.delays


async def test_the_number_of_delayed_calls_is_limited_and_the_cancelled_ones_leave():
    pace = RefusalPace()
    await refuse(pace, AT_ONCE)
    tasks = [asyncio.create_task(pace.delay("a", None)) for _ in range(MOST_OF_ONE + 50)]
    await asyncio.sleep(0)
    assert pace.num_delayed == MOST_OF_ONE
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pace.num_delayed == 0
