"""WorkerTemplate: the supervisor's handle of the process that forks workers (template.py)."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from kestrel_engine import processes

from ..logs.records import log_lifecycle
from .plan import WorkerTask

COMMAND: tuple[str, ...] = (sys.executable, "-m", "kestrel_grpc.workers.template")
"""Starts the template in a new interpreter, because this process may have loaded CUDA's driver. The arguments are the
number of the template's socket and the kind of device."""
START = subprocess.Popen


class WorkerTemplate(processes.Template):
    """The template. ``shared``: the variables that all workers have. ``device``: "cpu", or "cuda" if any worker has a
    GPU. Call ``stop`` at the end."""

    def __init__(self, shared: Mapping[str, str], device: str) -> None:
        super().__init__(self._started, outlives=True)
        self._shared, self._device = shared, device

    def _started(self, link: socket.socket) -> subprocess.Popen[bytes]:
        process = START(
            [*COMMAND, str(link.fileno()), self._device],
            pass_fds=(link.fileno(),),
            stdin=subprocess.DEVNULL,
            env=dict(self._shared),
            start_new_session=True,
        )
        log_lifecycle("template_started", pid=process.pid)
        return process

    def fork_worker(self, task: WorkerTask, line: socket.socket) -> None:
        """Starts a worker. ``line``: its end of the line to the supervisor. Raises OSError."""
        own = {
            name: value for name, value in task.environ.items() if self._shared.get(name) != value
        }
        self.fork(line, index=task.index, variables=own)


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
