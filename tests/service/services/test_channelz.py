"""gRPC's channelz: real counts of this process, for administrators only."""

import grpc
import pytest

from tests.service.security.test_admin import CONFIG, METADATA
from tests.service.statuses import failure

pb = pytest.importorskip("grpc_channelz.v1.channelz_pb2")
stubs = pytest.importorskip("grpc_channelz.v1.channelz_pb2_grpc")


async def test_an_administrator_sees_connections(serve):
    served = await serve(server_config=CONFIG)
    stub = stubs.ChannelzStub(served.channel)
    told = await failure(stub.GetServers(pb.GetServersRequest()))
    assert told.code is grpc.StatusCode.UNAUTHENTICATED
    servers = (await stub.GetServers(pb.GetServersRequest(), metadata=METADATA)).server
    own = [each for each in servers if each.data.calls_started >= 2]
    assert own
    request = pb.GetServerSocketsRequest(server_id=own[0].ref.server_id)
    sockets = await stub.GetServerSockets(request, metadata=METADATA)
    assert len(sockets.socket_ref) == 1 and "127.0.0.1" in sockets.socket_ref[0].name


async def test_callers_without_credentials_do_not(serve):
    served = await serve()
    told = await failure(stubs.ChannelzStub(served.channel).GetServers(pb.GetServersRequest()))
    assert (told.code, told.reason) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")
