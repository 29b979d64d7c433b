"""A server that is killed, hangs, can't write its log, or can't reach its collector: callers hear of it in time, or
never notice."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client._pb.kestrel.v1 import model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.process.start_and_stop import EXIT_ENGINE_FAILED
from tests.abuse.fake_server import MOVES_TIMERS, NO_END
from tests.abuse.process import ROOT, ServerProcess
from tests.ports import free_port
from tests.service.statuses import failure
from tests.waiting import until

Code = grpc.StatusCode
DEADLINE_S = 250.0


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


def query(max_tokens: int = 2) -> pb.QueryRequest:
    return pb.QueryRequest(
        query={"question": "what?", "max_tokens": max_tokens, "sampling": {"temperature": 0}}
    )


async def streams(stub: VisionServiceStub, count: int) -> list:
    """Streams that go on for minutes if nothing happens; each has begun to talk."""
    calls = [stub.StreamQuery(query(NO_END), timeout=DEADLINE_S) for _ in range(count)]
    for call in calls:
        events = aiter(call)
        for _ in range(2):
            await anext(events)
    return calls


async def test_sigkill_ends_all_streams_at_once_and_callers_find_the_next_server(tmp_path: Path):
    with ServerProcess(tmp_path) as first:
        async with channel_to(first.address) as channel:
            stub = VisionServiceStub(channel)
            calls = await streams(stub, 4)
            waiting = [stub.Query(query(), timeout=DEADLINE_S) for _ in range(3)]
            first.popen.kill()
            told = await asyncio.gather(*map(failure, [*calls, *waiting]))
            assert {each.code for each in told} == {Code.UNAVAILABLE}
            refused = await failure(stub.Query(query(), timeout=DEADLINE_S))
            assert refused.code is Code.UNAVAILABLE
            first.popen.wait(60)
            with ServerProcess(tmp_path, listen=first.address):
                answer = await stub.Query(query(), timeout=DEADLINE_S, wait_for_ready=True)
                assert answer.usage.output_tokens == 2


UNLIMITED = ("--max-deadline", "0", "--write-timeout", "0")
"""Calls may take as long as they want: time that a test lets pass does not end them."""


async def test_a_hung_step_ends_all_requests_with_a_status_and_the_process_still_stops(tmp_path):
    passed = tmp_path / "hang.passed"
    flags = ("--step-timeout", "60", "--grace", "60", *UNLIMITED)
    with ServerProcess(tmp_path, *flags, **{MOVES_TIMERS: "1"}) as server:
        async with channel_to(server.address) as channel:
            stub, health = VisionServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="kestrel.v1.VisionService")
            serving = health_pb2.HealthCheckResponse.SERVING
            assert (await health.Check(check)).status == serving
            calls = await streams(stub, 3)
            server.hang.touch()
            await until(server.hang.with_suffix(".hung").exists)
            passed.touch()
            told = await asyncio.gather(*map(failure, calls))
            assert {(each.code, each.reason) for each in told} == {
                (Code.INTERNAL, "COMPUTATION_FAILED")
            }

            async def has_failed():
                return (await health.Check(check)).status != serving

            await until(has_failed)
            refused = await failure(stub.Query(query(), timeout=DEADLINE_S))
            assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "MODEL_NOT_READY")
            load = await ModelServiceStub(channel).GetLoad(model_service_pb2.GetLoadRequest())
            assert load.state == model_service_pb2.MODEL_STATE_FAILED
        await until(lambda: "the server ends in 60 s" in server.log.read_text())
        passed.touch()
        # It still hangs: nobody waits for its thread for ever, and a signal isn't needed.
        assert await asyncio.to_thread(server.popen.wait, 60) == EXIT_ENGINE_FAILED
    log = server.log.read_text()
    assert "no step ended for" in log
    assert "stack of thread kestrel-steps" in log and "fake_server.py" in log


async def test_a_device_that_hangs_for_ever_ends_the_process_once_callers_have_their_status(
    tmp_path,
):
    flags = ("--step-timeout", "60", "--grace", "1", *UNLIMITED)
    with ServerProcess(tmp_path, *flags) as server:
        async with channel_to(server.address) as channel:
            calls = await streams(VisionServiceStub(channel), 3)
            server.hang.with_suffix(".passed").touch()
            server.hang.with_suffix(".forever").touch()
            told = await asyncio.gather(*map(failure, calls))
            assert {(each.code, each.reason) for each in told} == {
                (Code.INTERNAL, "COMPUTATION_FAILED")
            }
        assert await asyncio.to_thread(server.popen.wait, 60) == EXIT_ENGINE_FAILED
    assert "the engine has failed: the server ends in 1 s" in server.log.read_text()


async def test_sigterm_during_a_step_that_hangs_ends_calls_and_process(tmp_path):
    with ServerProcess(tmp_path, "--step-timeout", "600", "--grace", "1", *UNLIMITED) as server:
        async with channel_to(server.address) as channel:
            calls = await streams(VisionServiceStub(channel), 3)
            server.hang.with_suffix(".forever").touch()
            await until(server.hang.with_suffix(".hung").exists)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop, 120))
            told = await asyncio.gather(*map(failure, calls))
            assert {(each.code, each.reason) for each in told} == {
                (Code.UNAVAILABLE, "SHUTTING_DOWN")
            }
            await stopping  # The step would hang for 600 s.
    assert "the process ends without waiting for its threads" in server.log.read_text()


async def test_a_step_that_hangs_for_less_than_the_limit_costs_nobody_anything(tmp_path):
    with ServerProcess(tmp_path, "--step-timeout", "60") as server:
        async with channel_to(server.address) as channel:
            stub = VisionServiceStub(channel)
            request = query(100)
            call = stub.StreamQuery(request, timeout=DEADLINE_S)
            await anext(aiter(call))
            server.hang.touch()
            await until(server.hang.with_suffix(".hung").exists)
            server.hang.unlink()
            events = [event async for event in call]
            assert events[-1].final.usage.output_tokens == 100
        server.stop(within_s=60)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("which", ["stderr", "stdout"])
async def test_a_full_disk_for_the_log_is_no_callers_business(tmp_path, which):
    flags = ("--access-log", "json", "--log-format", "json")
    with open("/dev/full", "wb") as full:
        listen = f"127.0.0.1:{free_port() if which == 'stdout' else 0}"
        with ServerProcess(tmp_path, *flags, listen=listen, **{which: full}) as server:
            async with channel_to(server.address) as channel:
                stub = VisionServiceStub(channel)
                for _ in range(5):
                    answer = await stub.Query(query(), timeout=DEADLINE_S, wait_for_ready=True)
                    assert answer.usage.output_tokens == 2
                bad = await failure(stub.Query(pb.QueryRequest(), timeout=DEADLINE_S))
                assert bad.code is Code.INVALID_ARGUMENT
            server.stop(within_s=60)


async def test_a_log_that_nobody_reads_any_more_ends_nothing(tmp_path):
    """As with ``kestrel-grpc serve 2>&1 | head``: writing fails from then on."""
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    with reader.stdin, ServerProcess(tmp_path, "--access-log", stderr=reader.stdin) as server:
        async with channel_to(server.address) as channel:
            stub = VisionServiceStub(channel)
            for _ in range(3):
                await stub.Query(query(), timeout=DEADLINE_S)
        server.stop(within_s=60)


async def test_a_log_that_nobody_reads_holds_nobody_up_and_says_what_it_lost(tmp_path):
    """A pipe takes 64 KiB, whoever writes more waits."""
    pytest.importorskip("prometheus_client")
    read, write = os.pipe()
    metrics = f"127.0.0.1:{free_port()}"
    with (
        open(read, "rb") as reader,
        open(write, "wb") as pipe,
        ServerProcess(
            tmp_path,
            *("--access-log", "json", "--log-buffer-bytes", "8KiB", "--metrics-listen", metrics),
            stderr=pipe,
        ) as server,
    ):
        pipe.close()
        async with channel_to(server.address) as channel:
            stub = VisionServiceStub(channel)
            name = "x" * 120
            for number in range(30):
                batch = [
                    stub.Query(
                        query(), timeout=DEADLINE_S, metadata=(("x-request-id", f"{name}{n:06}"),)
                    )
                    for n in range(number * 10, number * 10 + 10)
                ]
                await asyncio.gather(*batch)
            lost = await asyncio.to_thread(lost_records, metrics)
            assert lost > 50
            log: list[bytes] = []
            reading = asyncio.create_task(asyncio.to_thread(log.extend, reader))
            await until(lambda: len(log) >= 300 - lost)
            await stub.Query(query(), timeout=DEADLINE_S)
            assert await asyncio.to_thread(lost_records, metrics) == lost
        server.stop(within_s=60)
        await reading
    told = [line for line in log if b"records were lost: the reader was too slow" in line]
    assert sum(int(re.search(rb": (\d+) records", line)[1]) for line in told) == lost
    calls = [line for line in log if b"VisionService/Query" in line]
    assert len(calls) == 301 - lost and b"stopped" in log[-1]


def lost_records(metrics: str) -> int:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as response:
        text = response.read().decode()
    return int(float(re.search(r"^kestrel_log_lost_total (\S+)$", text, re.MULTILINE)[1]))


COLLECTOR = ROOT / "tests/service/telemetry/collector.py"
GRACE_S = 3.0


@contextmanager
def collector(kind: str) -> Iterator[tuple[str, subprocess.Popen | None]]:
    """(endpoint, process): one that isn't there, one that takes connections and says nothing, one that lives."""
    if kind == "absent":
        yield f"http://127.0.0.1:{free_port()}", None
    elif kind == "mute":
        with socket.create_server(("127.0.0.1", 0)) as mute:
            yield f"http://127.0.0.1:{mute.getsockname()[1]}", None
    else:
        process = subprocess.Popen(
            [sys.executable, str(COLLECTOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().split()[0]}", process
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.mark.slow
async def test_without_their_collectors_services_are_the_same(tmp_path):
    """An exporter gives up later than callers: a call that waited for one would fail."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    servers = {}
    with ExitStack() as stack:
        for protocol in ("grpc", "http/protobuf"):
            for kind in ("absent", "mute", "dies"):
                if (kind, protocol) == ("dies", "http/protobuf"):
                    continue  # It dies the same way.
                folder = tmp_path / f"{protocol[:4]}-{kind}"
                folder.mkdir()
                endpoint, process = stack.enter_context(
                    collector("living" if kind == "dies" else kind)
                )
                variables = {
                    "OTEL_TRACES_EXPORTER": "otlp",
                    "OTEL_METRICS_EXPORTER": "otlp",
                    "OTEL_METRIC_EXPORT_INTERVAL": "300",
                    "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                    "OTEL_EXPORTER_OTLP_TIMEOUT": f"{10 * DEADLINE_S:.0f}",
                    "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                    "OTEL_BSP_SCHEDULE_DELAY": "100",
                }
                flags = ("--grace", str(GRACE_S), "--log-format", "json")
                server = stack.enter_context(ServerProcess(folder, *flags, **variables))
                servers[folder.name] = server
                await many_calls(server, process)
        # They stop together: each takes as long over its last spans as it may.
        await asyncio.gather(
            *(asyncio.to_thread(server.stop, within_s=60) for server in servers.values())
        )
    for name, server in servers.items():
        records = [json.loads(line) for line in server.log.read_text().splitlines()]
        # An exporter that did not end within 5 s is left to itself. It may complain after the server's last event.
        events = [record["event"] for record in records if "event" in record]
        assert events[-1] == "stopped", name
        complaints = [record for record in records if record["level"] in ("WARNING", "ERROR")]
        assert 1 <= len(complaints) < 40, f"{name}: it is told, not at every call"


async def many_calls(server: ServerProcess, process: subprocess.Popen | None) -> None:
    """After 20 of 60 calls ``process`` is killed."""
    async with channel_to(server.address) as channel:
        stub = VisionServiceStub(channel)
        for number in range(60):
            if number == 20 and process is not None:
                process.kill()
            await stub.Query(query(), timeout=DEADLINE_S)
