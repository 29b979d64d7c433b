"""The template of workers: a process that has imported what a worker imports, and forks workers in milliseconds.

A worker that starts in an interpreter of its own costs 2 s and more of processor time before it opens its model.

The template starts nothing that does not survive a fork: no gRPC core, no CUDA, no threads, no event loop. If a library
has started a thread all the same, workers start in interpreters of their own.

A job has the changes to the environment. The template ends with its supervisor. Its workers do not end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..process.interpreter import limit_spinning

if TYPE_CHECKING:
    from kestrel_engine import processes

MODULES = (
    "torch",
    "grpc.aio",
    "kestrel_engine.building.factory",
    "kestrel_engine.checkpoint.open",
    "kestrel_engine.checkpoint.weights.loader",
    "kestrel_engine.preprocess.tokenizer",
    "kestrel_engine.runtime.torch_runtime",
    "kestrel_grpc.workers.worker",
)
"""What workers import, also if a function does so. Packages that read the environment are not among them."""
CUDA_MODULES = ("kestrel_engine.runtime.gpu.runtime",)
"""What workers with a GPU import besides."""
ALONE = "kestrel_grpc.workers.worker"
"""The module that runs a worker in an interpreter of its own."""
_ONE_THREAD = "OPENBLAS_NUM_THREADS"
"""numpy's OpenBLAS starts threads when it is imported, unless this is 1."""
_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Service managers send these to all processes of a service. The supervisor decides when a template ends."""
_PR_SET_NAME = 15
"""From Linux's sys/prctl.h."""


def main(
    arguments: Sequence[str],
    modules: Sequence[str] | None = None,
    worker: Callable[[Sequence[str]], int] | None = None,
) -> int:
    """Runs the template, and in each fork a worker. ``arguments``: the socket's number and the kind of device.
    ``modules`` and ``worker``: what to import and to run instead. Returns the exit status of this process."""
    link = socket.socket(fileno=int(arguments[0]))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A fork must not ignore what the supervisor sends before it is a worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    if modules is None:
        modules = (*MODULES, *(CUDA_MODULES if arguments[1] == "cuda" else ()))
    before = os.environ.get(_ONE_THREAD)
    os.environ[_ONE_THREAD] = "1"
    from kestrel_engine import processes

    limit_spinning()
    for name in modules:
        with contextlib.suppress(ImportError):  # The worker reports what it misses.
            importlib.import_module(name)
    os.environ.pop(_ONE_THREAD)
    if before is not None:
        os.environ[_ONE_THREAD] = before
    gc.collect()
    gc.freeze()  # The forks share these objects' memory as long as no collection visits them.
    fork = processes.Forks(link).run()
    if fork is None:
        return 0
    return (worker or _worker)([str(_become_worker(fork))])


def _worker(arguments: Sequence[str]) -> int:
    from .worker import main

    return main(arguments)


def _become_worker(fork: processes.Fork) -> int:
    """Gives this process what a process of its own would have. Returns the descriptor of its line."""
    line = fork.line.detach()
    os.environ.update(fork.job["variables"])
    os.setsid()  # Ctrl-C in a terminal reaches the supervisor, which passes it on.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    # All workers have the template's command line. This name tells them apart, for instance in `ps -o comm`.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"worker {fork.job['index']}".encode(), 0, 0, 0)
    if fork.alone:
        os.set_inheritable(line, True)
        os.execv(sys.executable, [sys.executable, "-m", ALONE, str(line)])
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
