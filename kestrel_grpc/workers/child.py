"""Child: one worker's process as the supervisor sees it, from its start to its end."""

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
"""Starts a worker; the number of its socket follows, and for whoever looks at processes its index. An
interpreter of its own: gRPC and CUDA survive no fork."""


class Child:
    """Made by ``start``. ``wait`` is to be awaited to its end."""

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
        """Beats of the supervisor's clock since its event loop was last heard of; counted once it is ready."""
        self._process, self._line, self._on_ready = process, line, on_ready
        asyncio.get_running_loop().add_reader(line.fileno(), self._read)

    @classmethod
    async def start(cls, task: WorkerTask, on_ready: Callable[[Child, Ready], None]) -> Child:
        """Raises OSError where no process can be started."""
        ours, theirs = new_line()
        try:
            ours.give(task)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    str(task.index),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=dict(task.environ),
                    # Ctrl-C is the supervisor's to pass on.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return cls(task, process, ours, on_ready)

    @property
    def name(self) -> str:
        return f"worker {self.task.index}"

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Lets it end its requests and itself. ``number``: SIGINT leaves out the delay before."""
        self._send(number)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit status, negative for a signal; after that all it said has been read."""
        status = await self._process.wait()
        self._read()
        self._hang_up()
        return status

    def how_it_ended(self, status: int) -> str:
        """In words."""
        if self.failure is not None:
            return str(self.failure)
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        if self._line.fileno() < 0:
            return
        try:
            for message in self._line.messages():
                self._take(message)
        except EOFError:
            self._hang_up()

    def _take(self, message: Message) -> None:
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
