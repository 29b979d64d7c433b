"""One client makes more calls at once than a connection may carry. The others wait in the client; none is refused."""

import asyncio
from collections import Counter

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.settings.security import ConnectionLimits, SecurityConfig
from tests.abuse.attacks.registry import ending_of
from tests.service.conftest import serve

__all__ = ["serve"]


@pytest.mark.parametrize(
    ("streams", "num_calls"), [pytest.param(100, 600, marks=pytest.mark.slow), (7, 100)]
)
async def test_no_call_beyond_the_limit_of_a_connection_is_refused(serve, streams, num_calls):
    connections = ConnectionLimits(streams=streams)
    served = await serve(server_config={"security": SecurityConfig(connections=connections)})
    most = 0

    async def call(number: int) -> str:
        nonlocal most
        ended = await ending_of(
            served.vision.Query(pb.QueryRequest(query={"question": "?", "max_tokens": 2}))
        )
        most = max(most, served.server.in_flight.count)
        return ended

    # In the second round the streams of ended calls are still in the memory of gRPC's core.
    for _ in range(2):
        ended = Counter(await asyncio.gather(*map(call, range(num_calls))))
        assert ended == {grpc.StatusCode.OK.name: num_calls}
    assert most <= streams
