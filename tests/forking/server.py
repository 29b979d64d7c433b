"""The fork server: python -m tests.forking.server LISTENER LIFE. It has one thread, and forks at each request.

It imports what a server process imports, but starts nothing: no gRPC core, no threads of torch, no event loop. Those do
not survive a fork. Requests come over connections to LISTENER, a listening socket. A request is JSON: how, what,
arguments, folder, variables and the numbers of files. A socket for the number and the exit status of the process comes
with it, and these files, standard streams first. The fork server ends when the other end of LIFE, a pipe, is closed.
"""

import atexit
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

IMPORTED = (
    "kestrel_grpc.cli",  # It sets a variable that gRPC's core reads when it is imported.
    "torch",
    "grpc.aio",
    "kestrel_engine.checkpoint.weights.loader",
    "kestrel_engine.runtime.torch_runtime",
    "kestrel_grpc.cli.serve",
    "kestrel_grpc.http.app",
    "kestrel_grpc.http.port.listener",
    "kestrel_grpc.process.serving",
    "kestrel_grpc.workers.worker",
    "tests.engine.fakes",
)
READ_AT_IMPORT = ("opentelemetry", "prometheus_client")
"""Packages that read variables when they are imported."""


_exit_status: int | None = None
"""Of this process, once it is known that it ends without a traceback."""


def _leave() -> None:
    """Ends a fork before the interpreter frees every object: that copies all memory that the fork shares, in 0.4 s."""
    if _exit_status is not None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # The interpreter reports it.
            return
        os._exit(_exit_status & 0xFF)


_MOST_FILES = 16


def next_job(listener: socket.socket, life: int) -> tuple[dict[str, Any], list[int]] | None:
    """Forks for each request. Returns None at the end of ``life``; in a fork, returns what it is to do, and its files.

    A fork keeps no file of the fork server open.
    """
    with selectors.DefaultSelector() as selector, listener:
        selector.register(life, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == life:
                    os.close(life)
                    return None
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    request, fds, _, _ = socket.recv_fds(key.fileobj, 2**20, _MOST_FILES)
                    if not request:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                        continue
                    status = socket.socket(fileno=fds[0])
                    pid = os.fork()
                    if pid == 0:
                        status.close()
                        _close(selector)
                        return json.loads(request), fds[1:]
                    for fd in fds[1:]:
                        os.close(fd)
                    status.send(str(pid).encode())
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                else:
                    pid, status = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, ended = os.waitpid(pid, 0)
                    with status:
                        try:
                            status.send(str(os.waitstatus_to_exitcode(ended)).encode())
                        except BrokenPipeError:  # The test did not wait for its process.
                            pass


def _close(selector: selectors.BaseSelector) -> None:
    """Closes the files of ``selector``, and the sockets for exit statuses."""
    for key in selector.get_map().values():
        if key.data is not None:
            key.data[1].close()
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)


def _renumber(fds: list[int], numbers: list[int]) -> None:
    """Gives the open files ``fds`` other numbers."""
    free = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max(numbers)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(free, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _open_streams() -> None:
    """Opens the standard streams as the interpreter does at its start."""
    is_buffered = not os.environ.get("PYTHONUNBUFFERED")

    def output(fd: int, **options: Any) -> io.TextIOWrapper:
        binary = open(fd, "wb", -1 if is_buffered else 0, closefd=False)
        return io.TextIOWrapper(binary, write_through=not is_buffered, **options)

    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = output(1)
    sys.stderr = sys.__stderr__ = output(2, line_buffering=True, errors="backslashreplace")


def run(job: dict[str, Any]) -> None:
    """Does what ``python -m MODULE`` or ``python -c CODE`` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["folder"])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(job["variables"])
    _open_streams()
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [job["folder"], *added, *(p for p in sys.path[1:] if p not in inherited)]
    sys.argv[:] = [job["how"], *job["arguments"]]
    if job["how"] == "-m":
        runpy._run_module_as_main(job["what"])  # type: ignore[attr-defined]
    else:
        exec(compile(job["what"], "<string>", "exec"), vars(sys.modules["__main__"]))


def main() -> None:
    atexit.register(_leave)  # Before all others, so that it is called after all others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests.
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    assert not {*READ_AT_IMPORT} & set(sys.modules)
    gc.freeze()  # The forks share these objects' memory as long as no collection visits them.
    listener, life = map(int, sys.argv[1:])
    found = next_job(socket.socket(fileno=listener), life)
    if found is None:
        return
    job, fds = found
    _renumber(fds, job["files"])
    global _exit_status
    try:
        run(job)
        _exit_status = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _exit_status = ended.code or 0
        raise


if __name__ == "__main__":
    main()
