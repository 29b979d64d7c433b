"""``kestrel-grpc demo``: calls the skills, and takes its server along however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import psutil
import pytest

from kestrel_client.commands import own_server
from kestrel_client.commands.samples import samples
from tests.forking.process import ForkedProcess
from tests.service.cli.serve_process import READY
from tests.service.command_line import PROGRAM, ROOT, environment, executed, here


@pytest.fixture
def short_folder():
    """A folder for the demo's socket, whose path has 103 bytes at most. A test's own folder has a long path."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def ready_demo(output, temporary):
    """A demo whose server is ready. It writes into ``output``."""
    popen = ForkedProcess(
        [*PROGRAM, "demo", "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(TMPDIR=str(temporary)),
    )
    popen.stdout.readline()
    assert READY.match(popen.stdout.readline().strip())
    return popen


@pytest.mark.slow
def test_a_demo_that_is_told_to_stop_takes_its_server_along(tmp_path, short_folder):
    with ready_demo(tmp_path, short_folder) as popen:
        popen.send_signal(signal.SIGTERM)
        # The folder of the socket is removed only after the server has ended.
        assert popen.wait(60) == 130
    assert not list(short_folder.glob("kestrel-own-*"))


def test_the_server_of_a_demo_ends_when_nobody_holds_its_pipe(tmp_path):
    watched, held = os.pipe()
    command = [sys.executable, "-m", "kestrel_grpc.cli.own_server_process"]
    server = ForkedProcess(
        [*command, str(watched), "--listen", f"unix:{tmp_path}/s.sock"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
        pass_fds=(watched,),
    )  # fmt: skip
    os.close(watched)
    with server:
        assert READY.match(server.stdout.readline().strip())
        os.close(held)
        assert server.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_server(tmp_path, short_folder):
    with ready_demo(tmp_path, short_folder) as popen:
        (server,) = psutil.Process(popen.pid).children()
        assert "server.sock" in _command_line(server)
        popen.send_signal(signal.SIGKILL)
        assert popen.wait(60) == -signal.SIGKILL
    try:
        server.wait(60)
    except psutil.TimeoutExpired:  # Its new parent may not wait for it; then it is a zombie.
        assert _command_line(server) == ""


@pytest.fixture
def demo_servers(monkeypatch):
    """Makes the servers of demos that run in this process forks, and lists them."""
    servers = []

    def start(*arguments, **options):
        servers.append(ForkedProcess(*arguments, **options))
        return servers[-1]

    monkeypatch.setattr(
        own_server, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    )
    handler = signal.getsignal(signal.SIGTERM)
    yield servers
    signal.signal(signal.SIGTERM, handler)


def assert_complete(demo, folder):
    assert demo.returncode == 0, demo.stderr
    for skill in ("query", "point", "detect", "segment"):
        assert f"\n  {skill} " in demo.stdout, demo.stderr
    assert {path.stem for path in folder.iterdir()} == {"demo", *(s.name for s in samples())}


@pytest.mark.slow
def test_the_demo_calls_every_skill_and_ends_its_server(tmp_path, demo_servers):
    assert_complete(here("demo", "--output", tmp_path / "out"), tmp_path / "out")
    (server,) = demo_servers
    assert server.returncode == 0


@pytest.mark.slow
def test_the_demo_as_users_start_it_leaves_no_process(tmp_path):
    assert_complete(executed("demo", "--output", tmp_path / "out"), tmp_path / "out")
    ours = [
        p for p in psutil.Process().children(recursive=True) if "server.sock" in _command_line(p)
    ]
    assert ours == []


def _command_line(process):
    """Empty for one that ends at this moment, or has and was not waited for yet: other tests' processes may."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # A zombie is one as well.
        return ""
