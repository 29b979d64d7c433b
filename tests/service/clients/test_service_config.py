"""The service config that is shipped for other clients: it is the SDK's, and a plain client retries by it.

tests/client/calls has the number of attempts and their pauses."""

import asyncio
import json
import logging
from pathlib import Path

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_client.connection import SERVICE_CONFIG
from kestrel_grpc.service_names import IMAGE_SERVICE, MODEL_SERVICE, VISION_SERVICE
from tests.waiting import until

TEXT = (Path(__file__).parents[3] / "clients/service_config.json").read_text()
QUERY = pb.QueryRequest(query=pb.QueryTask(question="?"))


@pytest.fixture
async def plain(serve, caplog):
    """Serves, and opens a channel with nothing but the file's text; gives (server, stub, codes of its calls)."""
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    channels = []

    async def start(**settings):
        config = {"access_log": "text", **settings.pop("server_config", {})}
        served = await serve(server_config=config, **settings)
        options = [("grpc.service_config", TEXT), ("grpc.use_local_subchannel_pool", 1)]
        channels.append(grpc.aio.insecure_channel(served.server.addresses[0], options=options))
        return served, VisionServiceStub(channels[-1]), lambda: codes(caplog)

    yield start
    for channel in channels:
        await channel.close()


def codes(caplog):
    lines = [r.getMessage() for r in caplog.records if r.name == "kestrel_grpc.access"]
    return [line.split("code=")[1].split()[0] for line in lines]


def test_it_is_the_sdks():
    config = json.loads(TEXT)
    assert config == SERVICE_CONFIG
    (methods,) = config["methodConfig"]
    names = {name["service"] for name in methods["name"]}
    assert names == {VISION_SERVICE, IMAGE_SERVICE, MODEL_SERVICE}


async def test_a_call_is_repeated_until_the_server_is_ready(plain):
    served, stub, codes = await plain(load=False)
    call = asyncio.ensure_future(stub.Query(QUERY))
    await until(lambda: codes())
    await served.server.load()
    assert (await call).info.model == "fake"
    *before, last = codes()
    assert set(before) == {"UNAVAILABLE"} and last == "OK"
