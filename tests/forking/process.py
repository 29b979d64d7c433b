"""ForkedProcess: a Python process that starts in milliseconds, as a fork of the fork server (server.py)."""

import asyncio
import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.shell import FOLDERS

ROOT = Path(__file__).parents[2]
ADDRESS = "FORK_SERVER"
"""The variable that names the path of the running fork server's socket."""


def start_fork_server() -> None:
    """Starts a fork server for this process and those that it starts from now on. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="forks-", dir=os.environ.get(FOLDERS))
    path = f"{folder.name}/socket"
    watched, held = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        fds = (listener.fileno(), watched)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking.server", *map(str, fds)],
            pass_fds=fds,
            cwd=ROOT,
            # With more threads, OpenBLAS starts them when it is imported.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    os.close(watched)
    os.environ[ADDRESS] = path

    def stop() -> None:
        os.close(held)
        process.wait()
        folder.cleanup()

    atexit.register(stop)


class _ForkServer:
    """This process's connection to the fork server, which it starts at the first request unless there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None

    def fork(self, job: Mapping[str, Any], fds: list[int]) -> socket.socket:
        """Asks for a process. Returns the socket from which its number and later its exit status can be read."""
        with self._lock:
            if self._requests is None:
                self._requests = self._connect()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._requests, [json.dumps(job).encode()], [theirs.fileno(), *fds])
        return ours

    def _connect(self) -> socket.socket:
        if ADDRESS not in os.environ:
            start_fork_server()
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.connect(os.environ[ADDRESS])
        atexit.register(requests.close)
        return requests


_FORK_SERVER = _ForkServer()


class ForkedProcess(subprocess.Popen[Any]):
    """A ``subprocess.Popen`` for ``[sys.executable, "-m", MODULE, ...]`` and ``[sys.executable, "-c", CODE, ...]``.

    The process has the given arguments, variables, folder and standard streams, a signal's default handlers and a main
    module like any other. It differs from a new process in four things: its parent is the fork server, modules are
    imported already, variables that the interpreter or the C library read at their start have no effect, and at its
    end, after all threads and exit handlers, the interpreter does not free its objects. Tests that depend on one of
    these use ``subprocess.Popen``. Except on Linux, this is ``subprocess.Popen``.
    """

    if sys.platform == "linux":
        _status: socket.socket | None = None

        def _execute_child(
            self,
            args: Any,
            executable: Any,
            preexec_fn: Any,
            close_fds: Any,
            pass_fds: Any,
            cwd: Any,
            env: Any,
            startupinfo: Any,
            creationflags: Any,
            shell: Any,
            p2cread: int,
            p2cwrite: int,
            c2pread: int,
            c2pwrite: int,
            errread: int,
            errwrite: int,
            *_: Any,
        ) -> None:
            words = [os.fspath(word) for word in args]
            program, how, what, *arguments = words
            assert program == sys.executable and how in ("-m", "-c"), args
            assert preexec_fn is None, "not supported"
            job = {
                "how": how,
                "what": what,
                "arguments": arguments,
                "folder": os.fspath(cwd or os.getcwd()),
                "variables": dict(os.environ if env is None else env),
                "files": [0, 1, 2, *pass_fds],
            }
            streams = (p2cread, c2pwrite, errwrite)
            try:
                own = [number if fd == -1 else fd for number, fd in enumerate(streams)]
                self._status = _FORK_SERVER.fork(job, [*own, *pass_fds])
                self.pid = int(self._status.recv(64))
                self._child_created = True
            finally:
                # Popen's own method closes the process's ends of the pipes as well.
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

        def _internal_poll(self, *_: Any, **__: Any) -> int | None:
            if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
                try:  # Another thread may wait for the end.
                    self._read_status(0)
                finally:
                    self._waitpid_lock.release()  # type: ignore[attr-defined]
            return self.returncode

        def _wait(self, timeout: float | None) -> int:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if not self._read_status(timeout):
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return self.returncode

        def _read_status(self, timeout: float | None) -> bool:
            """Waits for the end of the process. Returns False if it has not ended within ``timeout`` seconds."""
            if self._status is not None:
                if not select.select([self._status], [], [], timeout)[0]:
                    return False
                self.returncode = int(self._status.recv(64))
                self._status.close()
                self._status = None
            return True


class _AsyncForkedProcess:
    """A ForkedProcess with the methods of ``asyncio.subprocess.Process`` that servers use."""

    def __init__(self, popen: ForkedProcess) -> None:
        self._popen = popen
        self.pid = popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    async def wait(self) -> int:
        while (status := self._popen.poll()) is None:
            await asyncio.sleep(0.01)
        return status


async def create_forked_process(*command: str, **options: Any) -> _AsyncForkedProcess:
    """``asyncio.create_subprocess_exec`` with a ForkedProcess. The process stays in the fork server's session."""
    return _AsyncForkedProcess(ForkedProcess(command, **options))


def run_forked(
    command: list[str], *, input: Any = None, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` with ``capture_output`` and a ForkedProcess."""
    pipe = subprocess.PIPE
    stdin = None if input is None else pipe
    with ForkedProcess(
        command, **{"stdin": stdin, "stdout": pipe, "stderr": pipe, **options}
    ) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
