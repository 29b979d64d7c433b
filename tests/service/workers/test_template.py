"""The template of workers: what a fork of it has, and what it does if it cannot fork."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys

import pytest

from kestrel_grpc.workers import forks
from tests.forking.process import create_forked_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")

REPORT = """
import json, os, signal, socket, sys, threading
from kestrel_grpc.workers import template

def report(arguments):
    with socket.socket(fileno=int(arguments[0])) as line:
        line.sendall(json.dumps({
            "own": os.environ["OWN"], "shared": os.environ["SHARED"], "pid": os.getpid(),
            "session": os.getsid(0), "name": open("/proc/self/comm").read().strip(),
            "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
            "files": len(os.listdir("/proc/self/fd")),
            "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }).encode())
        line.recv(1)
    return 5

if __name__ == "__main__":
    if sys.argv[1] == "thread":
        threading.Thread(target=signal.pause, daemon=True).start()
    sys.exit(template.main(sys.argv[2:], modules=("json",), worker=report))
"""


@pytest.fixture
async def start(monkeypatch):
    """Starts a template, with another thread if it is told to."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_forked_process)
    opened = []

    def open_one(how):
        monkeypatch.setattr(forks, "COMMAND", (sys.executable, "-c", REPORT, how))
        opened.append(forks.Template({"SHARED": "s", **os.environ}, "cpu"))
        return opened[-1]

    yield open_one
    for each in opened:
        await each.close()


async def fork(source, index):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        process = await source.fork(index, {"SHARED": "s", "OWN": f"o{index}"}, theirs)
    return process, ours


async def told(line):
    return json.loads(await asyncio.get_running_loop().sock_recv(line, 4096))


async def test_a_fork_has_what_a_process_of_its_own_would_have(start):
    source = start("alone")
    (first, a), (second, b) = [await fork(source, index) for index in (0, 1)]
    with a, b:
        for index, process, line in ((0, first, a), (1, second, b)):
            seen = await told(line)
            assert (seen["own"], seen["shared"]) == (f"o{index}", "s")
            assert seen["pid"] == seen["session"] == process.pid
            assert seen["name"] == f"worker {index}"
            assert seen["default"] and seen["openblas"] == os.environ.get("OPENBLAS_NUM_THREADS")
            # Standard streams, the line, and the folder that is listed.
            assert seen["files"] == 5
        second.signal(signal.SIGTERM)
        assert await second.wait() == -signal.SIGTERM
        second.signal(signal.SIGTERM)  # Nothing.
        a.send(b"x")
        assert await first.wait() == 5


async def test_sigterm_of_a_whole_service_leaves_the_template(start, caplog):
    caplog.set_level(logging.INFO)
    source = start("alone")
    first, line = await fork(source, 0)
    with line:
        await told(line)
        (record,) = (r for r in caplog.records if r.kestrel_event == "template_started")
        os.kill(record.kestrel_fields["pid"], signal.SIGTERM)
        line.send(b"x")
        assert await first.wait() == 5, "the template reports it"


async def test_with_another_thread_a_worker_gets_an_interpreter_of_its_own(start):
    process, line = await fork(start("thread"), 3)
    line.close()
    # It runs no report, but a worker, which finds that its supervisor has ended.
    assert await process.wait() == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_workers_import_starts_no_thread_and_no_cuda(device):
    code = f"""
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import importlib, sys
from kestrel_grpc.workers import template
for name in (*template.MODULES, *(template.CUDA_MODULES if {device!r} == "cuda" else ())):
    importlib.import_module(name)
assert template.num_threads() == 1
import torch
assert not torch.cuda.is_initialized()
assert not {{"opentelemetry", "prometheus_client"}} & set(sys.modules), "these read the environment"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
