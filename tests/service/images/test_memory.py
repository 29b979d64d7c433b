"""Callers that always send new images: once the caches are full, the memory in use stays the same."""

import asyncio
import gc
import io
import itertools
import sys
from collections import deque
from dataclasses import replace

import pytest
from PIL import Image

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS

KIB = 1024
CALLERS = 8
WARM_UP, ROUNDS = 240, 6
MOST_LEFT = 2.0
"""Blocks of Python's allocator, which a call may leave on average. A forgotten dictionary or message is more."""


def encoded(number: int) -> bytes:
    image = Image.new("RGB", (90 + number % 7, 60 + number % 5), (40, 160, 60))
    image.putpixel((number % 60, number % 50), (number % 251, number % 241, number % 239))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", comment=number.to_bytes(4))
    return buffer.getvalue()


@pytest.mark.parametrize("calls", [120, pytest.param(4000, marks=pytest.mark.slow)])
async def test_no_call_leaves_anything_once_the_caches_are_full(serve, calls):
    runtime = FakeRuntime(replace(LIMITS, num_pages=2000), lambda fed: 0)
    runtime.plans = deque(maxlen=1)  # type: ignore[assignment]
    served = await serve(
        runtime, server_config={"image_store_bytes": 64 * KIB}, image_cache_bytes=2048 * KIB
    )
    numbers = itertools.count()

    async def call(until: int) -> None:
        for number in numbers:
            request = pb.QueryRequest(query=pb.QueryTask(question="what?"))
            request.images.add().encoded = encoded(number)
            request.query.max_tokens = 1
            await served.vision.Query(request)
            if number + CALLERS >= until:
                return

    async def blocks(until: int) -> int:
        await asyncio.gather(*(call(until) for _ in range(CALLERS)))
        gc.collect()
        return sys.getallocatedblocks()

    begun = await blocks(WARM_UP)
    kept = len(served.server.images), served.server.images.size_bytes
    # What is made once and kept, by whichever part, is in few of the rounds. A leak is in each of them.
    for number in range(1, 1 + ROUNDS):
        ended = await blocks(WARM_UP + number * calls)
        if (left := (ended - begun) / calls) < MOST_LEFT:
            break
        begun = ended
    assert abs(len(served.server.images) - kept[0]) <= 2, "the store was not full"
    assert served.server.images.size_bytes <= 64 * KIB
    assert left < MOST_LEFT
