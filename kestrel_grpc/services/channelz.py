"""gRPC's channelz service: the connections, sockets and calls of this process, as gRPC's core counts them.

It needs the scope admin, because it names the addresses of all clients. grpcio-channelz (extra channelz) has the
servicer; without the package, the server has no such service.
"""

from __future__ import annotations

import importlib
import importlib.util

from ..edge.methods import Methods

_PACKAGE = "grpc_channelz"
SERVICE = "grpc.channelz.v1.Channelz"


def add_channelz(methods: Methods) -> tuple[str, ...]:
    """Adds the service if its package is installed. Returns the names of the services that were added."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return ()
    stubs = importlib.import_module(f"{_PACKAGE}.v1.channelz_pb2_grpc")
    servicer = importlib.import_module(f"{_PACKAGE}.v1.channelz").aio.ChannelzServicer()
    stubs.add_ChannelzServicer_to_server(servicer, methods.as_server)
    return (SERVICE,)
