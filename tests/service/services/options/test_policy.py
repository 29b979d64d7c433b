"""Priority, deadline and salt of a request, as they reach the engine."""

import asyncio

import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import clock
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until


def query(text="what?", *, max_tokens=2, image=None, **options):
    return pb.QueryRequest(
        images=() if image is None else [image],
        query=pb.QueryTask(
            question=text, max_tokens=max_tokens, sampling=common_pb2.Sampling(temperature=0)
        ),
        options=common_pb2.RequestOptions(**options),
    )


async def fill(served):
    """Takes every place of the batch."""
    running = [
        asyncio.ensure_future(served.vision.Query(query(max_tokens=NO_END)))
        for _ in range(LIMITS.max_batch_size)
    ]
    # Not before the last has its place: one may still wait for the prefix that another computes.
    await until(lambda: served.engine.stats.running >= len(running))
    return running


async def test_high_goes_before_normal_before_low(serve):
    served = await serve(EndlessRuntime())
    running = await fill(served)
    ended = []

    async def ask(priority):
        await served.vision.Query(query(priority=priority, max_tokens=20))
        ended.append(priority)

    waiting = []
    for priority in (common_pb2.PRIORITY_LOW, 0, common_pb2.PRIORITY_HIGH):
        for _ in range(LIMITS.max_batch_size):
            waiting.append(asyncio.ensure_future(ask(priority)))
    await until(lambda: served.engine.stats.waiting == len(waiting))
    for call in running:
        call.cancel()
    await asyncio.gather(*waiting)
    assert ended == [3, 3, 3, 0, 0, 0, 1, 1, 1]


async def test_the_engine_learns_of_the_deadline(serve):
    """Not only of the cancellation that follows it."""
    served = await serve()
    seen = []
    start = served.engine.start

    async def spy(request):
        seen.append(request.deadline_at - clock.now())
        return await start(request)

    served.engine.start = spy
    await served.vision.Query(query())
    await served.vision.Query(query(), timeout=50)
    assert 115 < seen[0] < 120, "the server's own limit"
    assert 45 < seen[1] < 51


async def test_prefixes_are_shared_with_equal_salt_only(serve):
    served = await serve()

    async def cached(**options):
        return (await served.vision.Query(query(image=raw_image(), **options))).usage.cached_tokens

    assert await cached() == 0
    assert await cached() > 80
    assert await cached(cache_salt="tenant 1") == 0
    assert await cached(cache_salt="tenant 2") == 0
    assert await cached(cache_salt="tenant 1") > 80
    assert await cached(cache_salt="") > 80
    crops = [piece.image.key for plan in served.runtime.plans for piece in plan.encode]
    assert len(set(crops)) == 3, "each salt has the picture encoded for itself"


@pytest.mark.parametrize("salt", ["x" * 129, "ä" * 65])
async def test_a_salt_has_128_bytes_at_most(serve, salt):
    served = await serve()
    told = await failure(served.vision.Query(query(cache_salt=salt)))
    assert told.fields == ["options.cache_salt"]
    assert "128" in told.message
    assert (await served.vision.Query(query(cache_salt="ä" * 64))).answers[0].text
