"""Child: the supervisor's handle of one worker process, from its start to its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from kestrel_engine import clock

from .forks import Fork, Template, ending
from .line import Alive, Failed, Message, Ready, SupervisorEnd, new_line
from .plan import WorkerTask


class Child:
    """A worker process. Create it with ``start``, then await ``wait``."""

    def __init__(
        self,
        task: WorkerTask,
        process: Fork,
        line: SupervisorEnd,
        on_ready: Callable[[Child, Ready], None],
    ) -> None:
        self.task, self.pid = task, process.pid
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.started_at = clock.now()
        self.silent_for = 0
        """Beats of the supervisor since the worker's last message. Counted only after the worker is ready."""
        self._process, self._line, self._on_ready = process, line, on_ready
        asyncio.get_running_loop().add_reader(line.fileno(), self._read)

    @classmethod
    async def start(
        cls, task: WorkerTask, template: Template, on_ready: Callable[[Child, Ready], None]
    ) -> Child:
        """Starts a worker for ``task``. Raises OSError if the process cannot be started."""
        supervisor_end, worker_socket = new_line()
        try:
            supervisor_end.send_task(task)
            with worker_socket:
                process = await template.fork(task.index, task.environ, worker_socket)
        except BaseException:
            supervisor_end.close()
            raise
        return cls(task, process, supervisor_end, on_ready)

    @property
    def name(self) -> str:
        return f"worker {self.task.index}"

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Asks the worker to finish its requests and end. ``number``: SIGINT skips the drain delay."""
        self._process.signal(number)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    async def wait(self) -> int | None:
        """Waits for the end of the process and reads its last messages. Returns the exit status, negative for a
        signal; None if it is not known."""
        status = await self._process.wait()
        self._read()
        self._hang_up()
        return status

    def how_it_ended(self, status: int | None) -> str:
        """Describes the end of the process for a log: the worker's error, the exit status or the signal."""
        if self.failure is not None:
            return str(self.failure)
        return ending(status)

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
