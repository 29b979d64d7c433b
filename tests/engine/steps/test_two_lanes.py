"""The engine on a runtime with two lanes: the same answers, and decode steps that overtake steps of new work."""

import asyncio
from dataclasses import replace

import numpy as np

from kestrel_engine.steps.loop import BESIDE_DEPTH
from kestrel_engine.types.step import Lane
from tests.engine.fakes import GREEDY
from tests.fake_runtime import FakeRuntime


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


class SlowNewWork(FakeRuntime):
    """A step of new work lasts as long as four decode steps. ``beside``: the decode steps that are out after the launch
    of each one that does not wait for the new work that is out."""

    def __init__(self, limits):
        super().__init__(limits)
        self.beside, self._ends_at, self._decoded, self._awaited = [], {}, 0, -1

    def launch(self, plan):
        new_work, decode = self.launched[Lane.NEW_WORK], self.launched[Lane.DECODE]
        if plan.lane is Lane.NEW_WORK:
            self._ends_at[plan.step_id] = self._decoded + 4
        elif new_work:
            assert not self.is_done(new_work[0]), "its sequences could have been in this step"
            self._awaited = max(self._awaited, -1 if plan.after is None else plan.after)
            if new_work[0].step_id > self._awaited:
                self.beside.append(len(decode) + 1)
        return super().launch(plan)

    def is_done(self, handle):
        return handle.lane is Lane.NEW_WORK and self._decoded >= self._ends_at[handle.step_id]

    def collect(self, handle):
        self._decoded += handle.lane is Lane.DECODE
        result = super().collect(handle)
        return replace(result, vision_s=1.0) if handle.lane is Lane.NEW_WORK else result


async def test_beside_new_work_few_decode_steps_are_out_and_sequences_join_at_once(
    make_engine, fake_limits
):
    limits = replace(fake_limits, num_pages=400, max_batch_size=4)
    expected = await ask(make_engine(FakeRuntime(limits)), 20)
    runtime = SlowNewWork(replace(limits, decodes_beside=True))
    engine = make_engine(runtime, itl_target_ms=0.0, step_crops=2, steps_out=4)
    assert await ask(engine, 20) == expected
    assert all(number <= BESIDE_DEPTH for number in runtime.beside)
