"""The messages that a server sends to systemd, on a socket like systemd's."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_grpc.process.systemd import Notifier
from tests.forking.process import ForkedProcess

ROOT = Path(__file__).parents[3]


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(str(tmp_path / "notify"))
        ours.settimeout(60)
        yield ours


def heard(listener):
    return listener.recv(4096).decode().split("\n")


def test_without_systemd_nothing_is_told():
    silent = Notifier({})
    silent.send("READY=1")
    assert silent.interval_s is None
    assert Notifier({"WATCHDOG_USEC": "1000000"}).interval_s is None, "nowhere to tell it"


def test_signs_of_life_come_twice_as_often_as_wanted(listener):
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "3000000"}
    assert Notifier(environ).interval_s == 1.5
    assert Notifier({**environ, "WATCHDOG_PID": str(os.getpid())}).interval_s == 1.5
    assert Notifier({**environ, "WATCHDOG_PID": "1"}).interval_s is None, "meant for another"
    assert Notifier({**environ, "WATCHDOG_USEC": "x"}).interval_s is None


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux'")
def test_a_socket_without_a_file():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(f"\0kestrel-test-{os.getpid()}")
        Notifier({"NOTIFY_SOCKET": f"@kestrel-test-{os.getpid()}"}).send("READY=1", "STATUS=x")
        assert heard(ours) == ["READY=1", "STATUS=x"]


def test_a_socket_that_is_gone_harms_nobody(tmp_path, caplog):
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send("READY=1")
    assert "cannot send READY=1 to systemd" in caplog.text


async def test_a_dead_engine_asks_for_a_restart(listener):
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "2000"}
    failed = False
    alive = asyncio.create_task(Notifier(environ).keep_alive(lambda: failed))
    for _ in range(3):
        assert await asyncio.to_thread(heard, listener) == ["WATCHDOG=1"]
    failed = True
    await alive
    told = []
    while not told or told[-1] == ["WATCHDOG=1"]:
        told.append(heard(listener))
    assert told[-1] == ["WATCHDOG=trigger", "STATUS=the engine has died"]


@pytest.mark.slow
def test_a_server_tells_that_it_is_ready_alive_and_stopping(listener, tmp_path):
    environ = {
        "PATH": "/usr/bin:/bin",
        "KESTREL_DRAIN_DELAY": "0",
        "NOTIFY_SOCKET": listener.getsockname(),
        "WATCHDOG_USEC": "200000",
    }
    process = ForkedProcess(
        [sys.executable, "-m", "tests.abuse.fake_server", "--listen", f"unix:{tmp_path}/server"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ,
    )  # fmt: skip
    try:
        ready, status = heard(listener)
        assert (ready, status) == ("READY=1", "STATUS=fake on fake (none)")
        for _ in range(5):
            assert heard(listener) == ["WATCHDOG=1"]
        process.send_signal(signal.SIGTERM)
        told = ["WATCHDOG=1"]
        while told == ["WATCHDOG=1"]:
            told = heard(listener)
        assert told[0] == "STOPPING=1"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()
