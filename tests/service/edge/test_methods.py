"""One request for the next call serves all methods."""

import asyncio
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import model_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    add_ModelServiceServicer_to_server,
)
from kestrel_grpc.edge.call_life import CallLife, CallWatchers, InFlight
from kestrel_grpc.edge.methods import Methods
from kestrel_grpc.security.admission.guard import Guard
from kestrel_grpc.settings.security import SecurityConfig


async def _num_tasks(add: Any) -> int:
    """Of a server that was ``add``ed its methods and waits for the first call."""
    server = grpc.aio.server()
    add(server)
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for _ in range(50):
        await asyncio.sleep(0)
    num_tasks = len(asyncio.all_tasks())
    await server.stop(None)
    return num_tasks


def test_no_task_waits_for_calls_of_one_method() -> None:
    def plainly(server: grpc.aio.Server) -> None:
        add_ModelServiceServicer_to_server(ModelServiceServicer(), server)

    def generically(server: grpc.aio.Server) -> None:
        guard = Guard(SecurityConfig(), 1000)
        methods = Methods(CallLife(guard, guard.connections, InFlight(), CallWatchers()))
        add_ModelServiceServicer_to_server(ModelServiceServicer(), methods.as_server)
        methods.add_to(server)

    methods = len(pb.DESCRIPTOR.services_by_name["ModelService"].methods)
    assert asyncio.run(_num_tasks(plainly)) == asyncio.run(_num_tasks(generically)) + methods
