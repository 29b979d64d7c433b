"""The messages between supervisor and worker.

The supervisor sends the worker its task, once. The worker then sends Ready, Failed and Alive messages. Each side
detects the end of the other when the line closes. A worker whose supervisor has ended drains, as after SIGTERM.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import pickle
import socket
from dataclasses import dataclass
from typing import Any

from kestrel_engine import processes

from .plan import WorkerTask

ALIVE_INTERVAL_S = 1.0
"""Seconds between the Alive messages of a worker."""
_MOST_TEXT = 8000


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker listens on the shared addresses."""

    model: str
    device_name: str
    dtype: str
    load_s: float
    addresses: tuple[str, ...]
    """The addresses on which only this worker listens."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why the worker ends.

    For a ConfigError, ``field`` and ``value`` are the error's and ``message`` is its limit. For other errors ``field``
    is empty. ``setting``: whether a setting is invalid, which ``message`` names.
    """

    message: str
    field: str = ""
    value: str = ""
    setting: bool = False

    def __str__(self) -> str:
        return f"{self.field}={self.value}: {self.message}" if self.field else self.message


@dataclass(frozen=True, slots=True)
class Alive:
    """The worker's event loop runs."""


Message = Ready | Failed | Alive
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Ready, Failed, Alive)}


def send_task(line: processes.Line, task: WorkerTask) -> None:
    """Sends the worker's task. It must be the first message, so that it fits the socket's buffer. Raises OSError."""
    pickled = pickle.dumps(dataclasses.replace(task, environ={}))
    line.send({"task": base64.b64encode(pickled).decode()})


class WorkerEnd:
    """The worker's end of the line. ``fd``: the socket that the supervisor passed to this process."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._line = processes.Line(self._socket, trusts=True)

    def fileno(self) -> int:
        return self._line.fileno()

    def task(self) -> WorkerTask:
        """Waits for the task. Raises EOFError if the supervisor has ended."""
        message = self._line.wait()
        if message is None:
            raise EOFError("the supervisor has ended")
        self._socket.setblocking(False)
        # Unpickling is safe here: the data comes from the parent process, over a socket that no other process has.
        task = pickle.loads(base64.b64decode(message["task"]))
        assert isinstance(task, WorkerTask)
        return task

    def send(self, message: Message) -> None:
        """Sends a message. Ignores errors, because ``has_ended`` reports the end of the supervisor."""
        with contextlib.suppress(OSError):
            self._line.send(_encode(message))

    def has_ended(self) -> bool:
        """Whether the supervisor has ended. Call this when the socket is readable."""
        return not self._line.read()

    def close(self) -> None:
        self._line.close()


def _encode(message: Message) -> dict[str, Any]:
    fields = {
        name: value[:_MOST_TEXT] if isinstance(value, str) else value
        for name, value in dataclasses.asdict(message).items()
    }
    return {"kind": type(message).__name__, **fields}


def decode(fields: dict[str, Any]) -> Message:
    """Returns the message that a worker has sent."""
    kind = _KINDS[fields.pop("kind")]
    if "addresses" in fields:
        fields["addresses"] = tuple(fields["addresses"])
    return kind(**fields)
