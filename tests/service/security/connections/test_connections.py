"""The edges of a connection, with gRPC's own client: age, streams, metadata, readers who don't read."""

import asyncio
import contextlib
import logging
import re
import threading

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError

from kestrel_client import AsyncKestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.process import grpc_ports
from kestrel_grpc.services.answers import run
from kestrel_grpc.services.vision import VisionService
from kestrel_grpc.settings.security import CallLimits, ConnectionLimits, SecurityConfig
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.service.wire import Wire
from tests.waiting import until


def query(max_tokens=2):
    return pb.QueryRequest(
        query=pb.QueryTask(
            question="what?", max_tokens=max_tokens, sampling=common_pb2.Sampling(temperature=0)
        )
    )


def connections(**limits):
    return {"security": SecurityConfig(connections=ConnectionLimits(**limits))}


async def test_a_connection_ages_and_no_call_notices(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    config = {**connections(age_s=0.3, age_grace_s=600), "access_log": "text"}
    served = await serve(EndlessRuntime(), server_config=config)
    stream = served.vision.StreamQuery(query(200))
    await anext(aiter(stream))

    async def replaced():
        assert (await served.vision.Query(query())).usage.output_tokens == 2
        return len(set(re.findall(r"peer=(\S+)", caplog.text))) >= 3

    await until(replaced)
    events = [event async for event in stream]
    assert events[-1].HasField("final"), "it outlived its connection's age"


async def test_connections_may_be_unlimited(serve):
    served = await serve(server_config=connections(connections=None))
    assert (await served.vision.Query(query())).usage.output_tokens == 2


async def test_a_connection_that_says_nothing_is_closed(serve, monkeypatch):
    monkeypatch.setattr(grpc_ports, "_HANDSHAKE_S", 0.3)
    served = await serve()
    host, _, port = served.server.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        while await reader.read(1000):  # The server's settings, then the end.
            pass
    writer.close()
    assert (await served.vision.Query(query())).usage.output_tokens == 2


async def test_a_stream_beyond_age_and_grace_is_cut_and_its_request_freed(serve):
    served = await serve(EndlessRuntime(), server_config=connections(age_s=0.2, age_grace_s=0.2))
    stream = served.vision.StreamQuery(query(NO_END))
    told = await failure(stream)
    assert told.code is grpc.StatusCode.UNAVAILABLE
    await until(lambda: not served.engine.num_requests)


async def test_a_client_that_vanished_is_noticed_and_its_request_freed(serve):
    limits = {"keepalive_s": 0.5, "keepalive_timeout_s": 0.5}
    served = await serve(EndlessRuntime(), server_config=connections(**limits))
    async with Wire(served.server.addresses[0]) as wire:
        async with grpc.aio.insecure_channel(wire.address) as channel:
            vision, begun = VisionServiceStub(channel), False
            while not begun:  # On a busy machine, an answer to keepalive may be late, too.
                stream = vision.StreamQuery(query(NO_END))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    begun = bool(await anext(aiter(stream)))
            assert served.engine.num_requests
            wire.cut()
            await until(lambda: not served.engine.num_requests)


async def test_a_quiet_client_that_is_there_stays_connected(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    limits = {"keepalive_s": 0.2, "keepalive_timeout_s": 60}
    config = {**connections(**limits), "access_log": "text"}
    served = await serve(server_config=config)
    async with (
        Wire(served.server.addresses[0]) as wire,
        grpc.aio.insecure_channel(wire.address) as channel,
    ):
        for _ in range(2):
            await VisionServiceStub(channel).Query(query())
            pings = wire.server_pings
            await until(lambda pings=pings: wire.server_pings >= pings + 3)
    assert len(set(re.findall(r"peer=(\S+)", caplog.text))) == 1


async def test_a_connection_has_so_many_calls_in_progress_and_no_more(serve):
    """With the SDK: a call that starts just as another ends may be refused, and is made again."""
    gate, most = threading.Event(), 0

    def watch(plan):
        nonlocal most
        gate.wait(60)
        most = max(most, served.server.guard.admission.calls)
        return 0.0

    runtime = FakeRuntime(LIMITS, never_ends, cost=watch)
    served = await serve(runtime, server_config=connections(streams=2))
    gate.set()
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as client:
        await client.query(None, "?", max_tokens=2)
        gate.clear()
        calls = [
            asyncio.ensure_future(client.query(None, "?", max_tokens=40, temperature=0.0))
            for _ in range(5)
        ]
        await until(lambda: served.server.guard.admission.calls == 2)
        gate.set()
        assert [each.usage.output_tokens for each in await asyncio.gather(*calls)] == [40] * 5
        assert most == 2, "the rest waits at the client"


async def test_metadata_is_bounded(serve):
    served = await serve(server_config=connections(metadata_bytes=4096))
    await served.vision.Query(query(), metadata=(("x-note", "a" * 3000),))
    told = await failure(served.vision.Query(query(), metadata=(("x-note", "a" * 5000),)))
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "metadata" in told.message
    await served.vision.Query(query())


@pytest.fixture
def large_events(monkeypatch):
    """A window is full after a few events."""

    def event(update, label):
        return {"text_delta": pb.TextDelta(text="x" * 100_000, output_tokens=update.token_index)}

    monkeypatch.setattr(run, "event_fields", event)


@pytest.mark.parametrize("kind", ["Query", "Analyze"])
async def test_a_reader_who_does_not_read_is_cut_off(serve, large_events, kind):
    config = {"security": SecurityConfig(calls=CallLimits(write_s=0.4))}
    served = await serve(EndlessRuntime(), server_config=config)
    tasks = [pb.Task(query=query(NO_END).query)] * 2
    requests = {
        "Query": query(NO_END),
        "Analyze": pb.AnalyzeRequest(image=raw_image(), tasks=tasks),
    }
    stream = getattr(served.vision, f"Stream{kind}")(requests[kind])
    await anext(aiter(stream))
    await until(lambda: not served.server.guard.admission.calls)
    await until(lambda: not served.engine.num_requests)  # What it held is free.
    await until(lambda: not served.server.in_flight.count)
    told = await failure(stream)
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    assert told.trailers["grpc-retry-pushback-ms"] == "-1"
    assert (await served.vision.Query(query())).usage.output_tokens == 2


async def test_a_reader_who_is_only_slow_is_not_cut_off(moved_clock, serve, large_events):
    config = {"security": SecurityConfig(calls=CallLimits(write_s=400, deadline_s=None))}
    served = await serve(EndlessRuntime(), server_config=config)
    stream = served.vision.StreamQuery(query(NO_END))
    events = aiter(stream)
    # Under load, an event may hold several tokens. So the test counts events, not tokens.
    for _ in range(60):
        await anext(events)
        moved_clock.advance(10)
    assert served.engine.num_requests == 1
    stream.cancel()
    await until(lambda: not served.engine.num_requests)


async def test_a_storm_of_cancellations_leaves_nothing_behind(serve):
    """As by HTTP/2's rapid reset: calls that are given up as soon as they are made."""
    served = await serve(EndlessRuntime(), max_queue=600, server_config=connections(streams=1000))
    for _ in range(3):
        calls = [served.vision.Query(query(NO_END)) for _ in range(200)]
        request = query(NO_END)
        streams = [served.vision.StreamQuery(request) for _ in range(100)]
        await until(lambda: served.engine.num_requests)
        for call in (*calls, *streams):
            call.cancel()
    assert (await served.vision.Query(query())).usage.output_tokens == 2
    admission = served.server.guard.admission
    await until(
        lambda: (
            not admission.calls
            and (not served.engine.num_requests)
            and (not served.server.in_flight.count)
        )
    )
    assert (served.server.guard.held_bytes, admission.limited) == (0, 0)


async def test_a_connection_that_goes_while_a_stream_is_written_is_no_fault_of_ours(
    serve, caplog, monkeypatch
):
    """What gRPC says of a batch that failed, before it tells the call that its caller has gone."""
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    served = await serve(EndlessRuntime(), server_config={"access_log": "text"})

    async def fails(self, *args, **kwargs):
        raise ExecuteBatchError('Failed "execute_batch"')

    monkeypatch.setattr(VisionService, "_stream", fails)
    told = await failure(served.vision.StreamQuery(query()))
    assert told.code is grpc.StatusCode.CANCELLED
    await until(lambda: "code=CANCELLED" in caplog.text)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
