"""Connections of strangers: silent ones, and ones whose headers never end or decompress to megabytes.

The attackers call from 127.0.0.2, the polite caller from 127.0.0.1.
"""

import asyncio
import contextlib
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.abuse.connections.hand_made_calls import head
from tests.abuse.connections.polite import MIB, Polite
from tests.abuse.connections.rude_sockets import PREFACE, frame
from tests.abuse.process import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the guard needs /proc, the test 127.0.0.2"
)

CONNECTIONS = 100
STRANGER = "127.0.0.2"
WATCH = "/grpc.health.v1.Health/Watch"
HEADERS, CONTINUATION, END_HEADERS = 1, 9, 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ServerProcess(tmp_path, "--max-connections", str(CONNECTIONS)) as process:
        yield process
        text = process.log.read_text(errors="replace")
        assert "Traceback" not in text, text[-3000:]


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 60, (STRANGER, 0))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while data := connection.recv(65536):
            del data
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@pytest.mark.slow
def test_silent_connections_of_one_address_leave_another_served(server: ServerProcess) -> None:
    silent = []
    for _ in range(CONNECTIONS):
        with contextlib.suppress(OSError):
            silent.append(connect(server.address))
            silent[-1].sendall(PREFACE + frame(4, 0, 0))
    wait_until(lambda: sum(map(is_open, silent)) <= CONNECTIONS / 2)
    with Polite(server) as polite:
        wait_until(lambda: len(polite.seconds) > 10)
    print(polite)
    held = sum(map(is_open, silent))
    for each in silent:
        each.close()
    assert held == CONNECTIONS / 2, "half of --max-connections"
    assert not polite.failed, str(polite)
    wait_until(lambda: "(address_limit " in server.log.read_text())
    text = server.log.read_text()
    assert text.count("(address_limit ") == 1 and f"of them from {STRANGER};" in text, "one line"


@contextlib.asynccontextmanager
async def stranger(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(STRANGER, 0))
    try:
        writer.write(PREFACE + frame(4, 0, 0))
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def endless_headers(address: str, seconds: float) -> None:
    """CONTINUATION after CONTINUATION; connects anew once."""
    piece = frame(CONTINUATION, 0, 1, (b"\x00\x04abcd\x40" + b"x" * 64) * 20) * 8
    end = time.monotonic() + seconds
    for _ in range(2):
        with contextlib.suppress(OSError, TimeoutError):
            async with stranger(address) as (_, writer):
                writer.write(frame(HEADERS, 0, 1, head(WATCH)))
                while time.monotonic() < end:
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), 5)
                    await asyncio.sleep(0)


def test_headers_without_end_are_bounded(server: ServerProcess) -> None:
    async def attack() -> None:
        await asyncio.gather(*(endless_headers(server.address, 0.5) for _ in range(24)))

    with Polite(server) as polite:
        asyncio.run(attack())
    print(polite)
    assert not polite.failed, str(polite)
    assert polite.peak - polite.rest < 768 * MIB, str(polite)


def test_headers_of_a_client_that_acknowledges_no_settings_are_not_kept(
    server: ServerProcess,
) -> None:
    """gRPC's core takes 16 MiB of headers in a call, in 5 KB of the wire, from such a client."""
    value = b"x" * 3000
    entry = b"\x40\x04bomb" + b"\x7f\xb9\x16" + value
    with Polite(server) as polite:
        with connect(server.address) as connection:
            connection.sendall(PREFACE + frame(4, 0, 0))
            connection.sendall(frame(HEADERS, END_HEADERS, 1, head(WATCH) + entry))
            for stream in range(3, 23, 2):
                block = head(WATCH) + b"\xbe" * 4000
                connection.sendall(frame(HEADERS, END_HEADERS, stream, block))
                connection.sendall(frame(0, 0, stream, bytes(5)))
            wait_until(lambda: not is_open(connection))
    print(polite)
    assert not polite.failed, str(polite)
    process = psutil.Process(server.popen.pid)
    wait_until(lambda: process.memory_info().rss - polite.rest < 64 * MIB)
    wait_until(lambda: "large_headers 1" in server.log.read_text())
