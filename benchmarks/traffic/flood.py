"""Flood: keeps many calls of one principal in flight, from a separate thread, and counts their statuses.

Each call is repeated when it is answered, or after a pause of about ``pause_s`` when it is refused.
"""

from __future__ import annotations

import asyncio
import collections
import random
import threading
from collections.abc import Callable
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub

Ask = Callable[[VisionServiceStub, random.Random], Any]
"""Makes one call with a stub and a random generator, and returns its awaitable answer."""


class Flood:
    """A context manager that runs the flood. ``ended``: the number of calls by the name of their status."""

    def __init__(self, address: str, in_flight: int, ask: Ask, *, pause_s: float = 1.0) -> None:
        self.ended: collections.Counter[str] = collections.Counter()
        self._address, self._in_flight, self._ask, self._pause_s = address, in_flight, ask, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="flood")

    async def _run(self) -> None:
        channels = [
            grpc.aio.insecure_channel(
                self._address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            for _ in range(max(1, self._in_flight // 100))
        ]
        stubs = [VisionServiceStub(channel) for channel in channels]
        callers = [
            asyncio.create_task(self._caller(stubs[i % len(stubs)], random.Random(i)))
            for i in range(self._in_flight)
        ]
        while not self._stop.is_set():
            await asyncio.sleep(0.05)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        for channel in channels:
            await channel.close()

    async def _caller(self, stub: VisionServiceStub, rng: random.Random) -> None:
        while True:
            try:
                await self._ask(stub, rng)
                self.ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.ended[error.code().name] += 1
                await asyncio.sleep(self._pause_s * (0.5 + rng.random()))

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(30)
