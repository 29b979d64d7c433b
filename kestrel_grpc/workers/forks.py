"""Template: the supervisor's handle of the template of workers (template.py), which it starts and starts again.

Fork: its handle of one process that the template has forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from ..logs.records import log_lifecycle
from .template import MOST_BYTES

COMMAND: tuple[str, ...] = (sys.executable, "-m", "kestrel_grpc.workers")
"""Starts the template in a new interpreter, because this process may have loaded CUDA's driver. The arguments are the
number of the template's socket and the kind of device."""
_STATUS_S = 5.0
"""Seconds that the template has to report the status of a process that has ended."""
_ATTEMPTS = 2
"""The template may be killed while it starts a worker."""


class Fork:
    """A worker's process. Await ``wait`` at the end."""

    def __init__(self, pid: int, process: int, answers: socket.socket) -> None:
        """``process``: a descriptor of the process, so that signals reach no other that got its number."""
        self.pid = pid
        self._process, self._answers = process, answers

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    async def wait(self) -> int | None:
        """Waits for the end. Returns the exit status, negative for a signal; None if the template ended before."""
        try:
            await _readable(self._process)
            status = b""
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_STATUS_S):
                    await _readable(self._answers.fileno())
                status = self._answers.recv(MOST_BYTES)
            return int(status) if status else None
        finally:
            os.close(self._process)
            self._process = -1
            self._answers.close()


class Template:
    """The template. ``shared``: the variables that all workers have. ``device``: "cpu", or "cuda" if any worker has a
    GPU. Call ``close`` at the end."""

    def __init__(self, shared: Mapping[str, str], device: str) -> None:
        self._shared, self._device = shared, device
        self._link: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def ensure(self) -> None:
        """Starts the template unless it runs. It then imports for seconds, and this function does not wait. Raises
        OSError."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._link is not None:
                self._link.close()
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    self._device,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=dict(self._shared),
                    start_new_session=True,
                )
            self._link.setblocking(False)
            log_lifecycle("template_started", pid=self._process.pid)

    async def ended(self) -> str:
        """Waits for the end of the process that runs now, or has run last. Says how it ended. Raises OSError."""
        if self._process is None:
            await self.ensure()
        assert self._process is not None
        return ending(await self._process.wait())

    async def fork(self, index: int, environ: Mapping[str, str], line: socket.socket) -> Fork:
        """Starts a worker. ``line``: its end of the line to the supervisor. Raises OSError."""
        own = {name: value for name, value in environ.items() if self._shared.get(name) != value}
        request = json.dumps({"index": index, "variables": own}).encode()
        for _ in range(_ATTEMPTS):
            await self.ensure()
            assert self._link is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._link, [request], [line.fileno(), theirs.fileno()])
                await _readable(ours.fileno())
                pid, fds, _, _ = socket.recv_fds(ours, MOST_BYTES, 1)
            except BaseException:
                ours.close()
                raise
            if pid:
                return Fork(int(pid), fds[0], ours)
            ours.close()
            how = await self.ended()
        raise OSError(f"the template of workers: {how}")

    async def close(self) -> None:
        """Ends the template, which no longer reports the ends of workers."""
        if self._link is not None:
            self._link.close()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


def ending(status: int | None) -> str:
    """Describes the end of a process for a log. ``status``: its exit status, negative for a signal."""
    if status is None:
        return "ended with an unknown status"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


async def _readable(fd: int) -> None:
    """Waits until ``fd`` is readable, or closed at its other end."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)
