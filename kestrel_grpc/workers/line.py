"""The line between supervisor and worker: a pair of sockets that keep messages apart. Owns what is said, and how.

The worker is told its task, once. It tells that it lives, is ready, or failed. Either notices the other's end by the
line's: a worker whose supervisor has gone drains, as if it had been told to.
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
"""How often a worker's event loop says that it runs."""
_MOST_BYTES = 128 * 1024
_MOST_TEXT = 8000


@dataclass(frozen=True, slots=True)
class Ready:
    """It listens on the shared addresses."""

    model: str
    device_name: str
    dtype: str
    load_s: float
    addresses: tuple[str, ...]
    """Its own."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why it ends. ``field`` and ``value`` are a ConfigError's, whose limit ``message`` is; else ``field`` is empty.
    ``setting``: a setting is at fault, which ``message`` names."""

    message: str
    field: str = ""
    value: str = ""
    setting: bool = False

    def __str__(self) -> str:
        return f"{self.field}={self.value}: {self.message}" if self.field else self.message


@dataclass(frozen=True, slots=True)
class Alive:
    """The event loop runs."""


Message = Ready | Failed | Alive
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Ready, Failed, Alive)}


def new_line() -> tuple[SupervisorEnd, socket.socket]:
    """Our end, and the one to hand to the worker's process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return SupervisorEnd(ours), theirs


class SupervisorEnd:
    """Closed by its owner."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours

    def fileno(self) -> int:
        return self._socket.fileno()

    def give(self, task: WorkerTask) -> None:
        """Fits the socket's buffer: the first message of all."""
        self._socket.send(pickle.dumps(dataclasses.replace(task, environ={})))

    def messages(self) -> Iterator[Message]:
        """Those that have come. Ends with EOFError once the worker has closed its end."""
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
    """``fd``: the socket that the supervisor handed over."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def fileno(self) -> int:
        return self._socket.fileno()

    def task(self) -> WorkerTask:
        """Waits for it. Raises EOFError if there is no supervisor any more."""
        data = self._socket.recv(_MOST_BYTES)
        if not data:
            raise EOFError("the supervisor has gone")
        self._socket.setblocking(False)
        # From the process that started us, over a socket that nobody else has.
        task = pickle.loads(data)
        assert isinstance(task, WorkerTask)
        return task

    def tell(self, message: Message) -> None:
        """Never raises: ``has_ended`` tells of a supervisor that has gone."""
        with contextlib.suppress(OSError):
            self._socket.send(_encode(message))

    def has_ended(self) -> bool:
        """Whether the supervisor has gone; to be asked when the socket is readable."""
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
