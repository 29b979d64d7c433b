"""Open files and connections: counted, exported, and reported before the limit is reached."""

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_grpc.process.open_files import FileWatch, complaint, raise_limit
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import ConnectionLimits, SecurityConfig
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.telemetry.open_files import file_limit, open_files
from tests.forking.process import ForkedProcess
from tests.tiny import VARIABLES
from tests.waiting import until, wait_until

ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="connections are counted from /proc")


def test_files_are_counted(tmp_path):
    before = open_files()
    opened = [(tmp_path / "file").open("w") for _ in range(5)]
    assert open_files() == before + 5
    for each in opened:
        each.close()
    assert open_files() == before
    assert file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_watch_complains_once_a_minute_until_there_is_room(caplog, still_clock):
    opened = 80
    watch = FileWatch(lambda: opened, lambda: 100)
    assert not watch.check() and not watch.is_crowded
    opened = 90
    assert watch.check() and watch.is_crowded
    still_clock.advance(59.0)
    assert not watch.check()
    assert caplog.text.count("90 of at most 100 files are open") == 1
    still_clock.advance(2.0)
    opened = 85
    assert not watch.check() and watch.is_crowded, "not relieved yet"
    assert caplog.text.count("85 of at most 100 files are open") == 1
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    opened = 79
    assert watch.check() and not watch.is_crowded
    opened = 90
    assert watch.check(), "and again"
    assert caplog.text.count("90 of at most 100 files") == 1, "within the minute once"


def test_the_limit_is_raised_and_compared_with_the_connections():
    def security(most):
        return SecurityConfig(connections=ConnectionLimits(connections=most))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        one = ServerConfig(security=security(772))
        both = replace(one, http=HttpConfig(http_listen=("127.0.0.1:0",)))
        assert complaint(one) is None
        assert "--max-connections 772, for gRPC and for HTTP, may need" in complaint(both)
        assert complaint(replace(both, security=security(386))) is None
        assert "may need 1003 open files, and this process may open 1000" in complaint(
            replace(both, security=security(387))
        )
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_said_where_the_system_does_not_tell(caplog):
    for count, limit in ((None, 100), (100, None)):
        watch = FileWatch(lambda count=count: count, lambda limit=limit: limit)
        assert not watch.check() and not watch.is_crowded
    assert caplog.text == ""


@linux
async def test_they_are_metrics(serve):
    telemetry = TelemetryConfig(prometheus="127.0.0.1:0")
    served = await serve(server_config={"telemetry": telemetry})

    def scraped():
        url = f"http://{served.server.telemetry.metrics_address}/metrics"
        text = urllib.request.urlopen(url, timeout=60).read().decode()
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines if name.startswith("kestrel_")}

    before = await asyncio.to_thread(scraped)
    channels = []
    for _ in range(4):
        channels.append(
            grpc.aio.insecure_channel(
                served.server.addresses[0], options=[("grpc.use_local_subchannel_pool", 1)]
            )
        )
        await channels[-1].channel_ready()
    opened = before["kestrel_connections_open"] + 4

    async def seen():  # The guard looks at connections ten times a second.
        after = await asyncio.to_thread(scraped)
        return after if after["kestrel_connections_open"] == opened else None

    after = await until(seen)
    assert after["kestrel_files_open"] >= before["kestrel_files_open"] + 4
    assert after["kestrel_files_limit"] == file_limit()
    assert after["kestrel_connections_limit"] == 1000
    assert after['kestrel_connections_ended_total{kestrel_reason="idle"}'] == 0
    assert (before["kestrel_streams_open"], after["kestrel_streams_limit"]) == (0, 100)
    watched = health_pb2_grpc.HealthStub(channels[0]).Watch(health_pb2.HealthCheckRequest())
    await watched.read()
    assert (await asyncio.to_thread(scraped))["kestrel_streams_open"] == 1
    watched.cancel()
    for channel in channels:
        await channel.close()


LIMIT = 160
SERVE = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
runpy.run_module("tests.abuse.fake_server", run_name="__main__")
"""


@pytest.mark.slow
@linux
def test_a_server_that_runs_out_of_files_says_so_before_and_serves_again_after(tmp_path):
    """With a real RLIMIT_NOFILE: connections of one client fill it."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "OTEL_"))}
    environ |= VARIABLES | {"KESTREL_THREADS": "1", "KESTREL_DRAIN_DELAY": "0"}
    flags = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    log = tmp_path / "log"
    with log.open("wb") as errors:
        server = ForkedProcess(
            [sys.executable, "-c", SERVE, *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environ,
        )
    connections = []

    def until_logged(text):
        """The log has a thread of its own."""
        wait_until(lambda: text in log.read_text(), log.read_text)

    try:
        line = server.stdout.readline()
        address = line.partition("listening on ")[2].partition(",")[0]
        assert address, log.read_text()
        host, port = address.split(":")
        until_logged("protocol=http")
        (line,) = [line for line in log.read_text().splitlines() if "protocol=http" in line]
        http_port = line.partition("addresses=127.0.0.1:")[2].split()[0]
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            def status():
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=60)
                return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

            def until_it_is(wanted):
                wait_until(lambda: status() == wanted, log.read_text)

            until_it_is("SERVING")
            opened = len(os.listdir(f"/proc/{server.pid}/fd"))
            assert opened < 0.8 * LIMIT, "room for the test"
            for _ in range(int(0.95 * LIMIT) - opened):
                connections.append(socket.create_connection((host, int(port)), 60))
            until_it_is("NOT_SERVING")
            until_logged(f"of at most {LIMIT} files are open, including connections")
            for _ in range(LIMIT):  # Beyond the limit: the kernel queues what isn't accepted.
                connections.append(socket.create_connection((host, int(port)), 60))
                connections.append(socket.create_connection((host, int(http_port)), 60))
            until_logged("cannot accept connections by HTTP: too many open files")
            assert status() == "NOT_SERVING", "who is connected is answered"
            while connections:
                connections.pop().close()
            until_it_is("SERVING")
        until_logged(f"of at most {LIMIT} files are open: below the threshold")
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
        text = log.read_text()
        assert text.count("files are open, including connections") == 1, "once a minute"
        assert text.count("cannot accept connections") == 1, "once a minute"
        assert f"may need 2365 open files, and this process may open {LIMIT}" in text
        assert len(text) < 10_000, "no line for each connection"
        assert "Traceback" not in text
    finally:
        for each in connections:
            each.close()
        server.kill()
        server.communicate()
