"""Memory and messages that cross between the server's process and its decoders. Owns both forms; knows no image.

A segment is memory without a name, passed by its file descriptor: encoded bytes or pixels on the way in, crops on the
way out. Only the descriptor is shared: the side that made a segment reads and writes it by calls that tell when the
other side made it too small.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

MOST_MESSAGE_BYTES = 64 * 1024

_LENGTH_BYTES = 4


@contextmanager
def new_segment() -> Iterator[int]:
    """The descriptor of an empty segment, closed at the end. It lies in memory on Linux; elsewhere it is a temporary
    file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("kestrel-image")
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


def write_segment(descriptor: int, data: Any) -> None:
    """Makes ``data``, a buffer, the contents of an empty segment."""
    view = memoryview(data).cast("B")
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], written)


def read_segment(descriptor: int, into: np.ndarray) -> bool:
    """Fills a contiguous uint8 array with the first bytes of a segment. False: it has fewer."""
    view = into.data.cast("B")
    read = 0
    while read < len(view):
        count = os.preadv(descriptor, [view[read:]], read)
        if count == 0:
            return False
        read += count
    return True


def send_message(link: socket.socket, message: dict[str, Any], segments: Sequence[int]) -> None:
    """``segments`` travel with the message. For messages of few bytes: a socket takes them at once."""
    data = json.dumps(message).encode()
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    if segments:
        socket.send_fds(link, [framed], list(segments))
    else:
        link.sendall(framed)


def take_message(received: bytearray) -> dict[str, Any] | None:
    """Takes the first whole message from what a socket gave; None if there is none yet. Raises ValueError if it is
    no message."""
    if len(received) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if length > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    end = _LENGTH_BYTES + length
    if len(received) < end:
        return None
    message = json.loads(bytes(received[_LENGTH_BYTES:end]))
    del received[:end]
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message
