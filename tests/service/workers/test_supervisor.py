"""The supervisor with workers that serve nothing: what it does when one ends, is silent, or can't start."""

import asyncio
import logging
import os
import re
import signal
import socket
import sys

import pytest

from kestrel_engine import ConfigError, RuntimeConfig
from kestrel_grpc.settings.flags import SettingsError
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.workers import WorkersConfig
from kestrel_grpc.workers import forks, restarts, supervisor
from kestrel_grpc.workers.child import Child
from kestrel_grpc.workers.supervisor import WorkersError, supervise
from tests.forking.process import ForkedProcess
from tests.service.workers import puppet
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads on Linux")


@pytest.fixture
def puppets(monkeypatch, tmp_path, capfd):
    """Supervises two puppets that behave as told, in this process, and returns its task. The puppets are forks."""
    monkeypatch.setattr(forks, "START", ForkedProcess)
    monkeypatch.setenv(puppet.FOLDER, str(tmp_path))
    monkeypatch.setattr(supervisor, "BEAT_S", 0.05)
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)

    def start(how, **workers):
        monkeypatch.setattr(supervisor, "PATIENCE_S", 0.2 if how == "stays" else 60.0)
        monkeypatch.setattr(forks, "COMMAND", (sys.executable, "-m", puppet.__name__, how))
        config = ServerConfig(
            listen=("127.0.0.1:0",),
            grace_s=0.3,
            workers=WorkersConfig(
                workers=2, devices=("cpu", "cuda:1"), spread="connections", **workers
            ),
        )
        return asyncio.create_task(supervise(config, RuntimeConfig()))

    return start


@pytest.fixture
def systemd(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def started(tmp_path, index):
    """A line for each start of a worker: its process, device, and the GPUs that it sees."""
    file = tmp_path / f"done-{index}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


async def so_far(what, task):
    """Waits until ``what()`` is true, while the supervisor runs."""
    await until(lambda: what() or task.done(), lambda: task)
    assert not task.done(), task


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


async def test_it_says_when_all_are_ready_and_ends_with_them(puppets, tmp_path, capfd, systemd):
    said = ""

    def ready():
        nonlocal said
        said += capfd.readouterr().out
        return said.endswith("\n")

    task = puppets("lives")
    await so_far(ready, task)
    assert said.startswith(
        "kestrel-grpc ready: puppet on cpu, cuda:1 (none), listening on 127.0.0.1:"
    )
    terminate()
    assert await task == 0
    assert systemd.recv(4096) == b"READY=1\nSTATUS=puppet on cpu, cuda:1 (none)"
    assert systemd.recv(4096).startswith(b"STOPPING=1\n")
    [(_, device, visible)] = started(tmp_path, 1)
    assert (device, visible) == ("cuda:1", "1")
    assert started(tmp_path, 0)[0][1] == "cpu"


@pytest.mark.parametrize("how", ["dies_once", "silent_once", "ends_once"])
async def test_one_that_ends_or_is_silent_is_started_anew(puppets, tmp_path, caplog, how):
    caplog.set_level(logging.INFO)
    # One that was drained is not counted: 0 restarts are allowed, and it comes back.
    task = puppets(how, restarts=0 if how == "ends_once" else 5)
    await so_far(lambda: caplog.text.count("worker_ready") == 2, task)
    (tmp_path / "go").touch()
    await so_far(lambda: len(started(tmp_path, 0)) == 2, task)
    await so_far(lambda: caplog.text.count("worker_ready worker=0") == 2, task)
    assert len(started(tmp_path, 1)) == 1, "the other goes on"
    assert ("error=killed by SIGKILL" in caplog.text) == (how != "ends_once")
    assert ("has sent nothing for" in caplog.text) == (how == "silent_once")
    terminate()
    assert await task == 0


async def test_a_template_that_is_killed_is_started_anew_and_its_workers_go_on(
    puppets, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    task = puppets("dies_once")
    await so_far(lambda: caplog.text.count("worker_ready") == 2, task)
    (template,) = templates(caplog)
    os.kill(template, signal.SIGKILL)
    await so_far(lambda: len(templates(caplog)) == 2, task)
    assert "template_ended error=killed by SIGKILL" in caplog.text
    assert "worker_ended" not in caplog.text
    (tmp_path / "go").touch()
    await so_far(lambda: caplog.text.count("worker_ready worker=0") == 2, task)
    assert "error=ended with an unknown status" in caplog.text
    assert len(started(tmp_path, 1)) == 1, "the other goes on"
    terminate()
    assert await task == 0


def templates(caplog):
    """The processes of the templates that were started."""
    return [int(pid) for pid in re.findall(r"template_started pid=(\d+)", caplog.text)]


async def test_a_template_that_cannot_import_ends_the_start(puppets, monkeypatch):
    task = puppets("lives")
    monkeypatch.setattr(forks, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(WorkersError, match=r"cannot be started: the template .* exit status 7"):
        await task


async def test_a_stop_does_not_wait_for_a_template_that_imports(puppets, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    task = puppets("lives")
    monkeypatch.setattr(forks, "COMMAND", (sys.executable, "-c", "import time; time.sleep(300)"))
    await so_far(lambda: templates(caplog), task)
    terminate()
    assert await task == 0
    with pytest.raises(ProcessLookupError):
        os.kill(templates(caplog)[0], 0)


async def test_one_whose_start_the_stop_does_not_see_ends_by_itself(puppets, monkeypatch):
    pids, handle = [], Child._handle

    def never_begun(child, message):
        if "pid" in message:
            pids.append(message["pid"])
        else:
            handle(child, message)

    monkeypatch.setattr(Child, "_handle", never_begun)
    task = puppets("lives")
    await so_far(lambda: len(pids) == 2, task)
    terminate()
    assert await task == 0
    for pid in pids:
        await until(lambda pid=pid: has_ended(pid), lambda: pids)


async def test_a_signal_reaches_one_that_is_no_worker_yet(puppets, monkeypatch):
    handle = Child._handle

    def signalled(child, message):
        handle(child, message)
        if "pid" in message:
            child.drain()

    monkeypatch.setattr(Child, "_handle", signalled)
    with pytest.raises(WorkersError, match="ended while loading: killed by SIGTERM"):
        await puppets("lives")


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_one_that_ends_too_often_ends_the_server(puppets, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    task = puppets("dies", restarts=2)
    await so_far(lambda: caplog.text.count("worker_ready") == 2, task)
    (tmp_path / "go").touch()
    with pytest.raises(WorkersError, match=r"worker 0 ended 3 times .* killed by SIGKILL"):
        await task
    assert len(started(tmp_path, 0)) == 3
    for index in (0, 1):
        for pid, *_ in started(tmp_path, index):
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


async def test_one_that_cant_start_ends_the_start(puppets):
    with pytest.raises(ConfigError) as raised:
        await puppets("fails")
    error = raised.value
    assert (error.field, error.value, error.limit) == (
        "max_batch_size",
        "9",
        "must be smaller (worker 1)",
    )
    with pytest.raises(SettingsError, match="--skill=a:B: none"):
        await puppets("misnames")


@pytest.mark.parametrize("how", ["stays", "ends_badly"])
async def test_workers_that_dont_end_in_order_cost_the_status(puppets, tmp_path, caplog, how):
    caplog.set_level(logging.INFO)
    task = puppets(how)
    await so_far(lambda: caplog.text.count("worker_ready") == 2, task)
    terminate()
    assert await task == 1
    assert ("killed by SIGKILL" if how == "stays" else "exit status 3") in caplog.text
