"""Line: one end of a pair of connected sockets between two processes, which carries messages and descriptors.

A message is a JSON object. Both ends bound its length, and neither trusts the other. An end that closes is the end of
the line, whatever ended its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

MOST_MESSAGE_BYTES = 64 * 1024
"""Bytes of a message from a process that an image or a constraint may control."""
MOST_TASK_BYTES = 4 * 2**20
"""Bytes of a message to such a process."""

_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 2
"""Descriptors of one message."""


class Line:
    """One end. The owner must close it."""

    def __init__(self, end: socket.socket, *, trusts: bool = False) -> None:
        """``trusts``: whether nothing untrusted can control the other end. Messages may then be longer and bring
        descriptors, which ``descriptors`` holds until the caller takes and closes them."""
        self._socket, self._trusts = end, trusts
        self._most_bytes = MOST_TASK_BYTES if trusts else MOST_MESSAGE_BYTES
        self._received = bytearray()
        self.descriptors: list[int] = []

    def fileno(self) -> int:
        """The descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(
        self, message: dict[str, Any], descriptors: Sequence[int] = (), flags: int = 0
    ) -> None:
        """Sends a message with copies of ``descriptors``. If the socket does not block, it must be so short that the
        socket accepts it at once. ``flags``: as of send(2). Raises OSError."""
        data = json.dumps(message).encode()
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        if descriptors:
            socket.send_fds(self._socket, [framed], list(descriptors), flags)
        else:
            self._socket.sendall(framed, flags)

    def read(self) -> bool:
        """Reads once from the socket. Returns False at the end of the line."""
        try:
            if self._trusts:
                data, found, _, _ = socket.recv_fds(self._socket, 64 * 1024, _MOST_DESCRIPTORS)
                self.descriptors += found
            else:
                data = self._socket.recv(64 * 1024)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._received += data
        return bool(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """The complete messages that `read` has read. Raises ValueError if the bytes are not a message."""
        while (message := self._take()) is not None:
            yield message

    def wait(self) -> dict[str, Any] | None:
        """Waits for the next message; None at the end of the line. For a socket that blocks. Raises ValueError if the
        bytes are not a message."""
        while (message := self._take()) is None:
            if not self.read():
                return None
        return message

    def detach(self) -> int:
        """Gives the socket to the caller, who must close it. Returns its descriptor."""
        return self._socket.detach()

    def close(self) -> None:
        """Closes the end, and the descriptors that nobody has taken. Idempotent."""
        self._socket.close()
        while self.descriptors:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.pop())

    def _take(self) -> dict[str, Any] | None:
        """Removes the first message from the received bytes; None if it is not complete."""
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "little")
        if length > self._most_bytes:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH_BYTES + length
        if len(self._received) < end:
            return None
        try:
            message = json.loads(bytes(self._received[_LENGTH_BYTES:end]))
        except RecursionError:
            raise ValueError("a message of too many levels") from None
        del self._received[:end]
        if not isinstance(message, dict):
            raise ValueError("a message that is not an object")
        return message
