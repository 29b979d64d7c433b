"""``kestrel-grpc serve``: what keeps it from starting, and what ends it."""

import signal
import subprocess
import sys

import pytest

from tests.abuse.fake_server import NO_END
from tests.abuse.process import ServerProcess
from tests.forking.process import ForkedProcess
from tests.service.cli.serve_process import Process
from tests.service.command_line import PROGRAM, ROOT, environment, here, kestrel
from tests.waiting import wait_until

WITHOUT_STREAMS = """
import os, sys
from kestrel_grpc.__main__ import main
os.closerange(0, 3)
for name in ("stdin", "stdout", "stderr"):  # As the interpreter has it that starts without these files.
    setattr(sys, name, None)
    setattr(sys, f"__{name}__", None)
sys.exit(main())
"""


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_needs_no_standard_streams(tmp_path, forked):
    address = f"unix:{tmp_path}/s.sock"
    flags = ["serve", "--listen", address]
    if forked:
        command = [sys.executable, "-c", WITHOUT_STREAMS, *flags]
        popen = ForkedProcess(command, cwd=ROOT, env=environment())
    else:
        command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *PROGRAM, *flags]
        popen = subprocess.Popen(command, cwd=ROOT, env=environment())
    try:
        done = kestrel("health", "--wait", 60, "--server", address)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(60) == 0
    finally:
        popen.kill()
        popen.wait()


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--weights", "/absent"], 2, "--weights=/absent"),
        (["--max-batch-size", "-3"], 2, "--max-batch-size=-3"),
        (["--listen", "unix:/absent/k.sock"], 1, "cannot listen on unix:/absent/k.sock"),
    ],
)
def test_a_server_that_cannot_start_says_why(flags, status, words):
    done = kestrel("serve", "--listen", "127.0.0.1:0", *flags)
    assert done.returncode == status
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kestrel-grpc serve: error: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout


def test_a_misspelt_model_ends_the_server_before_it_listens():
    for flags in (
        ["--model", "nope"],
        ["--weights", "/absent"],
        ["--workers", 2, "--model", "nope"],
    ):
        done = here("serve", "--listen", "127.0.0.1:0", *flags)
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert error.startswith(f"kestrel-grpc serve: error: {flags[-2]}={flags[-1]}: ")


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (signal.SIGTERM, ForkedProcess),
        (signal.SIGINT, ForkedProcess),
        pytest.param(signal.SIGTERM, subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_model_loads_ends_the_server(tmp_path, number, start):
    """A new process imports torch when the signal comes, a fork reads weights."""
    process = Process(tmp_path / "log", "--listen", f"unix:{tmp_path}/k.sock", start=start)
    try:
        wait_until(
            lambda: "listening" in process.log.read_text() or process.popen.poll() is not None
        )
        assert process.popen.poll() is None, process.log.read_text()
        process.signal(number)
        assert process.wait() == 0
    finally:
        process.kill()
    assert not (tmp_path / "k.sock").exists()


def test_ctrl_c_leaves_out_the_delay_before_draining(tmp_path):
    with ServerProcess(tmp_path, "--drain-delay", "600") as process:
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(60) == 0
    log = process.log.read_text()
    assert "draining" in log and "leaving" not in log


def test_a_second_signal_ends_the_server_at_once(tmp_path):
    socket = f"unix:{tmp_path}/k.sock"
    with ServerProcess(tmp_path, listen=socket) as process:
        client = ForkedProcess(
            [*PROGRAM, "query", "hi", "--server", socket, "--max-tokens", str(NO_END), "--stream"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
        )  # fmt: skip
        try:
            assert client.stdout.read(1), client.stderr.read()
            process.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: "SIGTERM" in process.log.read_text())
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(60) == 128 + signal.SIGTERM
            assert client.wait(60) == 1
            assert "unavailable" in client.stderr.read()
        finally:
            client.kill()
            client.communicate()
    assert not (tmp_path / "k.sock").exists()
