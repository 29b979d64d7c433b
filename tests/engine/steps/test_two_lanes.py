"""The engine on a runtime with two lanes: the same answers, and decode steps that overtake steps of new work."""

import asyncio
from dataclasses import replace

import numpy as np

from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_engine.types.step import Lane
from tests.engine.fakes import GREEDY


def image(number):
    return np.full((40, 60, 3), number, np.uint8)


async def ask(engine, count):
    async def one(index):
        question = "why? " * (1 + index % 3)
        source = image(index) if index % 3 else None
        stream = await engine.submit("query", source, {"question": question}, GREEDY)
        if index % 5 == 4:
            await stream.aclose()
            return None
        return (await stream.result()).token_ids

    return await asyncio.gather(*(one(index) for index in range(count)))


async def test_two_lanes_give_the_same_answers(make_engine, fake_limits):
    limits = replace(fake_limits, num_pages=400, max_batch_size=4)
    expected = await ask(make_engine(FakeRuntime(limits)), 20)
    runtime = FakeRuntime(replace(limits, decodes_beside=True))
    engine = make_engine(runtime, itl_target_ms=0.0, step_crops=2)
    assert await ask(engine, 20) == expected
    lanes = {plan.lane for plan in runtime.plans}
    assert lanes == {Lane.DECODE, Lane.NEW_WORK}
    assert not any(plan.decode and (plan.prefill or plan.encode) for plan in runtime.plans)


async def test_a_failed_step_fails_its_requests_alone(make_engine, fake_limits):
    runtime = FakeRuntime(replace(fake_limits, decodes_beside=True))
    engine = make_engine(runtime)
    before = await ask(engine, 4)
    runtime.fail_next = RuntimeError("scripted")
    results = await asyncio.gather(ask(engine, 1), return_exceptions=True)
    assert isinstance(results[0], Exception)
    assert await ask(engine, 4) == before
    runtime.fail_launch = MemoryError("scripted")
    results = await asyncio.gather(ask(engine, 1), return_exceptions=True)
    assert isinstance(results[0], Exception)
    assert await ask(engine, 4) == before
