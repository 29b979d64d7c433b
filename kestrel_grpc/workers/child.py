"""Child: the supervisor's handle of one worker process, from its start to its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from .line import Alive, Failed, Message, Ready, SupervisorEnd, new_line
from .plan import WorkerTask

COMMAND: tuple[str, ...] = (sys.executable, "-m", "kestrel_grpc.workers")
"""Starts a worker in a new interpreter, because gRPC and CUDA do not survive a fork. The arguments are the number of
the worker's socket, and its index, which only serves to identify it in a list of processes."""


class Child:
    """A worker process. Create it with ``start``, then await ``wait``."""

    def __init__(
        self,
        task: WorkerTask,
        process: asyncio.subprocess.Process,
        line: SupervisorEnd,
        on_ready: Callable[[Child, Ready], None],
    ) -> None:
        self.task, self.pid = task, process.pid
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.started_at = time.monotonic()
        self.silent_for = 0
        """Beats of the supervisor since the worker's last message. Counted only after the worker is ready."""
        self._process, self._line, self._on_ready = process, line, on_ready
        asyncio.get_running_loop().add_reader(line.fileno(), self._read)

    @classmethod
    async def start(cls, task: WorkerTask, on_ready: Callable[[Child, Ready], None]) -> Child:
        """Starts a worker for ``task``. Raises OSError if the process cannot be started."""
        supervisor_end, worker_socket = new_line()
        try:
            supervisor_end.send_task(task)
            with worker_socket:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(worker_socket.fileno()),
                    str(task.index),
                    pass_fds=(worker_socket.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=dict(task.environ),
                    # A new session does not receive the terminal's Ctrl-C. The supervisor passes it on.
                    start_new_session=True,
                )
        except BaseException:
            supervisor_end.close()
            raise
        return cls(task, process, supervisor_end, on_ready)

    @property
    def name(self) -> str:
        return f"worker {self.task.index}"

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Asks the worker to finish its requests and end. ``number``: SIGINT skips the drain delay."""
        self._signal(number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for the end of the process and reads its last messages. Returns the exit status, negative for a
        signal."""
        status = await self._process.wait()
        self._read()
        self._hang_up()
        return status

    def how_it_ended(self, status: int) -> str:
        """Describes the end of the process for a log: the worker's error, the exit status or the signal."""
        if self.failure is not None:
            return str(self.failure)
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        if self._line.fileno() < 0:
            return
        try:
            for message in self._line.messages():
                self._handle(message)
        except EOFError:
            self._hang_up()

    def _handle(self, message: Message) -> None:
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
        if self._line.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._line.close()
