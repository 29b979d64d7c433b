"""A server at an address that others share: it comes when it is ready and goes when it drains."""

import asyncio
import socket
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.workers.port import HeldPorts
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads on Linux")

OWN = "127.0.0.1:0"


@pytest.fixture
def shared():
    with HeldPorts(("127.0.0.1:0",)) as held:
        yield held.addresses[0]


def server_at(shared, *own):
    config = RuntimeConfig()

    async def load_engine():
        runtime = FakeRuntime(LIMITS, lambda fed: 197, cost=lambda plan: 0.005)
        return InferenceEngine(config, fake_build(config, runtime))

    return KestrelServer(ServerConfig(listen=own, shared_listen=(shared,)), config, load_engine)


def listens(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


async def health(address):
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_it_is_at_the_shared_address_only_while_it_answers(shared):
    server = server_at(shared, OWN)
    await server.start()
    (own,) = server.own_addresses
    assert not listens(shared) and await health(own) == "NOT_SERVING"
    await server.load()
    assert server.addresses == (own, shared)
    assert await health(shared) == await health(own) == "SERVING"
    async with grpc.aio.insecure_channel(shared) as channel:
        stub = VisionServiceStub(channel)
        asked = pb.QueryRequest(
            query=pb.QueryTask(
                question="?", max_tokens=40, sampling=common_pb2.Sampling(temperature=0)
            )
        )
        running = asyncio.create_task(_answer(stub, asked))
        await until(lambda: server.served.default.loaded.num_requests)
        await server.drain()
        await until(lambda: not listens(shared))
        assert await health(own) == "NOT_SERVING", "there it can still be asked"
        assert (await running).usage.output_tokens == 40
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await stub.Query(asked)
    await server.stop(0)
    assert not listens(own)


async def _answer(stub, asked):
    return await stub.Query(asked)


async def test_several_share_it_and_a_stranger_cant(shared):
    servers = [server_at(shared), server_at(shared)]
    for server in servers:
        await server.start()
        await server.load()
    with pytest.raises(AddressError, match="another server"):
        await KestrelServer(ServerConfig(listen=(shared,)), RuntimeConfig(), None).start()
    await servers[0].stop(0)
    assert await health(shared) == "SERVING", "the other's"
    await servers[1].stop(0)
    assert not listens(shared)
