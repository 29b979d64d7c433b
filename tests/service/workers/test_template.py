"""The template of workers: what a fork of it has, and what it does if it cannot fork."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from kestrel_engine import RuntimeConfig
from kestrel_engine.processes import Line
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.workers import child, forks
from kestrel_grpc.workers.child import Child
from kestrel_grpc.workers.plan import WorkerTask
from tests.forking.process import ForkedProcess
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")

REPORT = """
import json, os, select, signal, sys, threading
from kestrel_grpc.workers import template

def report(arguments):
    from kestrel_grpc.workers.line import Failed, WorkerEnd

    line = WorkerEnd(int(arguments[0]))
    line.task()
    line.send(Failed(json.dumps({
        "own": os.environ["OWN"], "shared": os.environ["SHARED"], "pid": os.getpid(),
        "session": os.getsid(0), "name": open("/proc/self/comm").read().strip(),
        "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "files": len(os.listdir("/proc/self/fd")),
        "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    })))
    select.select([line], [], [])
    return 5

if __name__ == "__main__":
    if sys.argv[1] == "thread":
        threading.Thread(target=signal.pause, daemon=True).start()
    if sys.argv[1] == "full":
        os.fork = lambda: os.close(-1)  # Raises OSError, as if no process were left.
    sys.exit(template.main(sys.argv[2:], modules=("json",), worker=report))
"""
SHARED = {"SHARED": "s", **os.environ}


@pytest.fixture
def start(monkeypatch):
    """Starts a template, with another thread if it is told to."""
    monkeypatch.setattr(forks, "START", ForkedProcess)
    opened = []

    def open_one(how):
        monkeypatch.setattr(forks, "COMMAND", (sys.executable, "-c", REPORT, how))
        opened.append(forks.WorkerTemplate(SHARED, "cpu"))
        return opened[-1]

    yield open_one
    for each in opened:
        each.stop()


def task(index, environ=SHARED):
    return WorkerTask(
        index=index, server=ServerConfig(), runtime=RuntimeConfig(), device="cpu", environ=environ
    )


async def forked(template, index):
    environ = {**SHARED, "OWN": f"o{index}"}
    return await Child.start(task(index, environ), template, lambda *_: None)


async def told(worker):
    await until(lambda: worker.failure is not None)
    return json.loads(str(worker.failure))


async def test_a_fork_has_what_a_process_of_its_own_would_have(start):
    template = start("alone")
    children = [await forked(template, index) for index in (0, 1)]
    for index, worker in enumerate(children):
        seen = await told(worker)
        assert (seen["own"], seen["shared"]) == (f"o{index}", "s")
        assert seen["pid"] == seen["session"] == worker.pid
        assert seen["name"] == f"worker {index}"
        assert seen["default"] and seen["openblas"] == os.environ.get("OPENBLAS_NUM_THREADS")
        # Standard streams, the line, and the folder that is listed.
        assert seen["files"] == 5
    first, second = children
    second.drain()
    assert await second.wait() == -signal.SIGTERM
    second.drain()  # Nothing.
    first.line.send({})
    assert await first.wait() == 5


async def test_sigterm_of_a_whole_service_leaves_the_template(start):
    template = start("alone")
    first = await forked(template, 0)
    await told(first)
    os.kill(template.pid, signal.SIGTERM)
    first.line.send({})
    assert await first.wait() == 5, "the template reports it"


async def test_a_template_that_cannot_fork_is_told(start, monkeypatch):
    monkeypatch.setattr(child, "_STATUS_S", 0)
    template = start("full")
    with pytest.raises(OSError, match="lets it start no process"):
        await forked(template, 0)
    template.stop()  # A thread waits for its end.


def test_with_another_thread_a_worker_gets_an_interpreter_of_its_own(start):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start("thread").fork_worker(task(3), theirs)
        theirs.close()
        ours.shutdown(socket.SHUT_WR)
        line = Line(ours, trusts=True)
        assert line.wait()["pid"] > 0
        # It runs no report, but a worker, which finds that its supervisor has ended.
        assert line.wait()["ended"] == 1
        line.close()


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
from kestrel_engine.processes.forking import num_threads
assert num_threads() == 1
import torch
assert not torch.cuda.is_initialized()
assert not {{"opentelemetry", "prometheus_client"}} & set(sys.modules), "these read the environment"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
