"""Appends lines to an operator's file or to standard output, so that no other process can redirect or delay them.

The file is opened for each write: it may be moved away at any time, and the next line is in a new file. The last part
of its path must not be a link, and no FIFO and no device is opened. A new file is for its owner only.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from datetime import UTC, datetime

STDOUT = "-"
"""The path that stands for standard output."""
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def stamp(instant: float) -> str:
    """Seconds since the epoch as lines show them: in UTC, by RFC 3339, with milliseconds."""
    at = datetime.fromtimestamp(instant, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LineFile:
    """Lines at ``path``. A line of which only a part was written stays as a line of its own."""

    def __init__(self, path: str) -> None:
        self._path, self._is_within_line = path, False

    def check(self) -> None:
        """Opens the file, which makes it if it is missing. Raises OSError."""
        if self._path != STDOUT:
            os.close(_open(self._path))

    def write(self, line: bytes) -> None:
        """Appends a line, which ends with a line break. Raises OSError if it was not written whole."""
        data = b"\n" + line if self._is_within_line else line
        written = append(self._path, data)
        if written < len(data):
            self._is_within_line |= written > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_within_line = False


def append(path: str, lines: bytes) -> int:
    """Appends ``lines`` in one write, and returns the number of bytes that were written: fewer if the disk became full.

    Several processes may append to one file. Up to PIPE_BUF bytes stay together in a pipe, too. Raises OSError.
    """
    if path == STDOUT:
        return _print(lines)
    descriptor = _open(path)
    try:
        return os.write(descriptor, lines)
    finally:
        os.close(descriptor)


def _print(lines: bytes) -> int:
    descriptor = sys.stdout.fileno()
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    if not ready.poll(0):
        raise OSError(errno.EAGAIN, "the reader of standard output is too slow")
    return os.write(descriptor, lines)


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link; name the file itself", path) from None
        if error.errno == errno.ENXIO:  # A FIFO without a reader, or a socket.
            raise OSError(errno.EINVAL, "is not a regular file", path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    why = None
    if not stat.S_ISREG(mode):
        why = "is not a regular file"
    elif mode & stat.S_IWOTH:
        why = "may be written by every user of this machine: chmod o-w"
    if why is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, why, path)
    return descriptor
