"""Flood: keeps many calls of one principal in flight, from a separate process, and counts their statuses.

Each call is repeated when it is answered, or after a pause of about ``pause_s`` when it is refused.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub

from .processes import ChildProcess

Ask = Callable[[VisionServiceStub, random.Random], Any]
"""Makes one call with a stub and a random generator, and returns its awaitable answer. Can be pickled."""

LOWER_PRIORITY = 10
"""The process's nice value. The callers of a real flood run on other machines. Here they get the processor time that
the server and the measured caller leave."""


class Flood:
    """A context manager that runs the flood."""

    def __init__(self, address: str, in_flight: int, ask: Ask, *, pause_s: float = 1.0) -> None:
        self._arguments = address, in_flight, ask, pause_s
        self._child: ChildProcess

    @property
    def ended(self) -> collections.Counter[str]:
        """The number of calls that have ended so far, by the name of their status."""
        self._child.pipe.send("ended")
        ended: collections.Counter[str] = self._child.pipe.recv()
        return ended

    def __enter__(self) -> Flood:
        self._child = ChildProcess(_run, *self._arguments)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.end()


def _run(pipe: Connection, *arguments: Any) -> None:
    os.nice(LOWER_PRIORITY)
    asyncio.run(_call(pipe, *arguments))


async def _call(pipe: Connection, address: str, in_flight: int, ask: Ask, pause_s: float) -> None:
    """Keeps the calls in flight until None arrives. Sends the counts on request."""
    ended: collections.Counter[str] = collections.Counter()

    async def caller(stub: VisionServiceStub, rng: random.Random) -> None:
        while True:
            try:
                await ask(stub, rng)
                ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code().name] += 1
                await asyncio.sleep(pause_s * (0.5 + rng.random()))

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(address, options=options) for _ in range(max(1, in_flight // 100))
    ]
    stubs = [VisionServiceStub(channel) for channel in channels]
    callers = [
        asyncio.create_task(caller(stubs[i % len(stubs)], random.Random(i)))
        for i in range(in_flight)
    ]
    while (await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(ended)
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    for channel in channels:
        await channel.close()
