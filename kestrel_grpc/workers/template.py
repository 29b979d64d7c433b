"""The template of workers: a process that has imported what a worker imports, and forks workers in milliseconds.

A worker that starts in an interpreter of its own costs 2 s and more of processor time before it opens its model. The
workers that serve lack this time when one of them has ended.

The template starts nothing that does not survive a fork: no gRPC core, no CUDA, no threads, no event loop. If a library
has started a thread all the same, workers start in interpreters of their own.

A request is a message with the changes to the environment, and two files: the worker's end of its line, and a socket
for the answers. The first answer is the process's number with a descriptor of the process (pidfd), the second its exit
status. The template ends with its supervisor. Its workers do not end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
MOST_BYTES = 64 * 1024
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
    if modules is None:
        modules = (*MODULES, *(CUDA_MODULES if arguments[1] == "cuda" else ()))
    given = os.environ.get(_ONE_THREAD)
    os.environ[_ONE_THREAD] = "1"
    for name in modules:
        with contextlib.suppress(ImportError):  # The worker reports what it misses.
            importlib.import_module(name)
    os.environ.pop(_ONE_THREAD)
    if given is not None:
        os.environ[_ONE_THREAD] = given
    gc.collect()
    gc.freeze()  # The forks share these objects' memory as long as no collection visits them.
    fork = _fork_on_request(link)
    if fork is None:
        return 0
    fork.become_worker()
    return (worker or _worker)([str(fork.line)])


def _worker(arguments: Sequence[str]) -> int:
    from .worker import main

    return main(arguments)


@dataclass(frozen=True)
class _Fork:
    """What a fork of the template knows. ``line``: the number of the worker's end. ``alone``: a thread did not survive
    the fork, so the worker needs an interpreter of its own."""

    index: int
    variables: dict[str, str]
    line: int
    alone: bool

    def become_worker(self) -> None:
        """Gives this process what a process of its own would have."""
        os.environ.update(self.variables)
        os.setsid()  # Ctrl-C in a terminal reaches the supervisor, which passes it on.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # All workers have the template's command line. This name tells them apart, for instance in `ps -o comm`.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"worker {self.index}".encode(), 0, 0, 0)
        if self.alone:
            os.set_inheritable(self.line, True)
            os.execv(sys.executable, [sys.executable, "-m", ALONE, str(self.line)])


def _fork_on_request(link: socket.socket) -> _Fork | None:
    """Forks for each request. Returns None when the supervisor has ended, and in a fork what it knows.

    A fork keeps no file of the template open but its line.
    """
    with selectors.DefaultSelector() as selector, link:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    _report_end(selector, key)
                    continue
                request, fds, _, _ = socket.recv_fds(link, MOST_BYTES, 2)
                if not request:
                    return None
                line, answers = fds[0], socket.socket(fileno=fds[1])
                alone = num_threads() > 1
                if (pid := os.fork()) == 0:
                    answers.close()
                    _close(selector)
                    return _Fork(**json.loads(request), line=line, alone=alone)
                os.close(line)
                process = os.pidfd_open(pid)
                with contextlib.suppress(OSError):  # The supervisor may have ended.
                    socket.send_fds(answers, [str(pid).encode()], [process])
                selector.register(process, selectors.EVENT_READ, (pid, answers))


def _report_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, answers = key.data
    selector.unregister(key.fileobj)
    os.close(key.fd)
    _, status = os.waitpid(pid, 0)
    with answers, contextlib.suppress(OSError):
        answers.send(str(os.waitstatus_to_exitcode(status)).encode())


def _close(selector: selectors.BaseSelector) -> None:
    """Closes what the template knows about the other workers."""
    for key in selector.get_map().values():
        if key.data is not None:
            _, answers = key.data
            answers.close()
            os.close(key.fd)


def num_threads() -> int:
    """The number of threads of this process."""
    return len(os.listdir("/proc/self/task"))
