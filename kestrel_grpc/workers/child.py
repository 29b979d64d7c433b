"""Child: the supervisor's handle of one worker process, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from kestrel_engine import clock, processes

from .forks import WorkerTemplate, ending
from .line import Alive, Failed, Message, Ready, decode, send_task
from .plan import WorkerTask

_STATUS_S = 5.0
"""Seconds that the template has to report the status of a process that has ended."""
_ATTEMPTS = 2
"""The template may be killed while it starts a worker."""


class Child:
    """A worker process. Create it with ``start``, then await ``wait``. ``on_ready``: called with the child."""

    def __init__(self, task: WorkerTask, on_ready: Callable[[Child, Ready], None]) -> None:
        self.task, self.pid, self._on_ready = task, 0, on_ready
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.started_at = clock.now()
        self.silent_for = 0
        """Beats of the supervisor since the worker's last message. Counted only after the worker is ready."""
        ours, self._theirs = socket.socketpair()
        ours.setblocking(False)
        self.line = processes.Line(ours, trusts=True)
        self._process = -1
        """A descriptor of the process, so that signals reach no other that got its number."""
        self._status: int | None = None
        self._has_begun, self._has_ended = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().add_reader(self.line.fileno(), self._read)

    @classmethod
    async def start(
        cls, task: WorkerTask, template: WorkerTemplate, on_ready: Callable[[Child, Ready], None]
    ) -> Child:
        """Starts a worker for ``task``. Raises OSError if the process cannot be started."""
        for _ in range(_ATTEMPTS):
            child = cls(task, on_ready)
            try:
                with child._theirs as theirs:
                    template.fork_worker(task, theirs)
                await child._has_begun.wait()
            except BaseException:
                child._hang_up()
                raise
            if child.pid:
                # Not before: a worker that nobody can stop has no task, and ends with the line.
                with contextlib.suppress(OSError):  # It has ended already, which ``wait`` reports.
                    send_task(child.line, task)
                return child
        try:
            async with asyncio.timeout(_STATUS_S):
                how = ending(await asyncio.to_thread(template.wait))
        except TimeoutError:
            how = "it runs, but the system lets it start no process"
        raise OSError(f"the template of workers: {how}")

    @property
    def name(self) -> str:
        return f"worker {self.task.index}"

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Asks the worker to finish its requests and end. ``number``: SIGINT skips the drain delay."""
        self._signal(number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    async def wait(self) -> int | None:
        """Waits for the end of the process and reads its last messages. Returns the exit status, negative for a
        signal; None if the template ended before."""
        try:
            await _readable(self._process)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_S):
                    await self._has_ended.wait()
        finally:
            self._hang_up()
            os.close(self._process)
            self._process = -1
        return self._status

    def how_it_ended(self, status: int | None) -> str:
        """Describes the end of the process for a log: the worker's error, the exit status or the signal."""
        if self.failure is not None:
            return str(self.failure)
        return ending(status)

    def _read(self) -> None:
        is_open = self.line.read()
        for message in self.line.messages():
            self._handle(message)
        if not is_open:
            self._hang_up()

    def _handle(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self.pid, self._process = message["pid"], self.line.descriptors.pop(0)
            self._has_begun.set()
        elif "ended" in message:
            self._status = message["ended"]
            self._has_ended.set()
        else:
            self._heed(decode(message))

    def _heed(self, message: Message) -> None:
        self.silent_for = 0
        match message:
            case Ready():
                self.ready = message
                self._on_ready(self, message)
            case Failed():
                self.failure = message
            case Alive():
                pass

    def _hang_up(self) -> None:
        if self.line.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.line.fileno())
            self.line.close()
        self._has_begun.set()
        self._has_ended.set()


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)
