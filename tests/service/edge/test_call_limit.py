"""Calls that exceed the server's time limit end; other calls are not affected."""

import asyncio

import pytest

from kestrel_engine import DeadlineExceeded, clock
from kestrel_grpc.edge.calls.call import CallLimit

LIMIT_S = 0.1

pytestmark = pytest.mark.usefixtures("still_clock")


async def test_each_call_has_the_whole_limit_whatever_others_do():
    limit = CallLimit(LIMIT_S)

    async def late(delay_s):
        await asyncio.sleep(delay_s)
        began = clock.now()
        with pytest.raises(DeadlineExceeded, match=r"took 0\.1 s"):
            await limit.within(asyncio.sleep(60))
        return clock.now() - began

    async def early():
        return await limit.within(asyncio.sleep(0.01, "answer"))

    late_ones = [asyncio.create_task(late(delay)) for delay in (0.0, 0.05, 0.25)]
    assert await asyncio.gather(*(early() for _ in range(10))) == ["answer"] * 10
    for taken in await asyncio.gather(*late_ones):
        assert taken == pytest.approx(LIMIT_S)


async def test_a_task_can_go_on_after_the_limit_cut_a_call():
    limit = CallLimit(LIMIT_S)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await limit.within(asyncio.sleep(60))
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert await limit.within(asyncio.sleep(0, 5)) == 5
