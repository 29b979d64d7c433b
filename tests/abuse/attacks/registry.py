"""The attacks by name, and what several of them need."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.target import OWN, Target

MIB = 1024 * 1024
QUERY, CHECK = "/kestrel.v1.VisionService/Query", "/grpc.health.v1.Health/Check"

Attack = Callable[[Target], Awaitable[Counter[str]]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


async def many(count: int, one: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """What ``count`` of them came to."""
    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


@contextlib.asynccontextmanager
async def open_stub(target: Target) -> AsyncIterator[VisionServiceStub]:
    async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
        yield VisionServiceStub(channel)


async def ending_of(call: Awaitable[object]) -> str:
    """The name of the status with which a call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
