"""The line between supervisor and worker: a pair of connected sockets that preserve message boundaries.

The supervisor sends the worker its task, once. The worker then sends Ready, Failed and Alive messages. Each side
detects the end of the other when the socket closes. A worker whose supervisor has ended drains, as after SIGTERM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from .plan import WorkerTask

ALIVE_INTERVAL_S = 1.0
"""Seconds between the Alive messages of a worker."""
_MOST_BYTES = 128 * 1024
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


def new_line() -> tuple[SupervisorEnd, socket.socket]:
    """The supervisor's end, and the socket to pass to the worker's process."""
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor.setblocking(False)
    return SupervisorEnd(supervisor), worker


class SupervisorEnd:
    """The supervisor's end of the line. The owner must close it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_task(self, task: WorkerTask) -> None:
        """Sends the worker's task. It must be the first message, so that it fits the socket's buffer."""
        self._socket.send(pickle.dumps(dataclasses.replace(task, environ={})))

    def messages(self) -> Iterator[Message]:
        """The messages that have arrived. Raises EOFError after the last one if the worker has closed its end."""
        while True:
            try:
                data = self._socket.recv(_MOST_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            yield _decode(data)

    def close(self) -> None:
        self._socket.close()


class WorkerEnd:
    """The worker's end of the line. ``fd``: the socket that the supervisor passed to this process."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def fileno(self) -> int:
        return self._socket.fileno()

    def task(self) -> WorkerTask:
        """Waits for the task. Raises EOFError if the supervisor has ended."""
        data = self._socket.recv(_MOST_BYTES)
        if not data:
            raise EOFError("the supervisor has ended")
        self._socket.setblocking(False)
        # Unpickling is safe here: the data comes from the parent process, over a socket that no other process has.
        task = pickle.loads(data)
        assert isinstance(task, WorkerTask)
        return task

    def send(self, message: Message) -> None:
        """Sends a message. Ignores errors, because ``has_ended`` reports the end of the supervisor."""
        with contextlib.suppress(OSError):
            self._socket.send(_encode(message))

    def has_ended(self) -> bool:
        """Whether the supervisor has ended. Call this when the socket is readable."""
        try:
            return not self._socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


def _encode(message: Message) -> bytes:
    fields = {
        name: value[:_MOST_TEXT] if isinstance(value, str) else value
        for name, value in dataclasses.asdict(message).items()
    }
    return json.dumps({"kind": type(message).__name__, **fields}).encode()


def _decode(data: bytes) -> Message:
    fields = json.loads(data)
    kind = _KINDS[fields.pop("kind")]
    if "addresses" in fields:
        fields["addresses"] = tuple(fields["addresses"])
    return kind(**fields)
