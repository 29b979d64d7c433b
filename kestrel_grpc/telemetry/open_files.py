"""Open files of this process, their limit, and the connections among them. Imports no OpenTelemetry.

Linux tells all of it in /proc/self, which needs no package; elsewhere /dev/fd has the files, and connections aren't
counted.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable

_FOLDERS = ("/proc/self/fd", "/dev/fd")
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"
_STATE, _INODE = 3, 9
"""Columns of the kernel's tables; the local address, with its port in hexadecimal, is column 1."""


def file_limit() -> int | None:
    """Files that this process may have open (RLIMIT_NOFILE); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files() -> int | None:
    """How many files this process has open; None where the system doesn't tell."""
    for folder in _FOLDERS:
        try:
            return len(os.listdir(folder)) - 1  # The folder itself was one.
        except OSError as error:
            if error.errno == errno.EMFILE:
                return file_limit()
    return None


def open_connections(ports: Iterable[int]) -> int | None:
    """TCP connections that this process accepted on ``ports``; None where the system doesn't tell. A port may be
    shared with other processes, whose connections don't count."""
    wanted = {f"{port:04X}" for port in ports}
    try:
        ours = _sockets()
        count = 0
        for table in _TABLES:
            with open(table, encoding="ascii") as lines:
                next(lines)
                for line in lines:
                    cells = line.split()
                    count += (
                        cells[_STATE] == _ESTABLISHED
                        and cells[1].rpartition(":")[2] in wanted
                        and cells[_INODE] in ours
                    )
    except OSError:
        return None
    return count


def _sockets() -> set[str]:
    """Inodes of the sockets of this process. Raises OSError where there is no /proc."""
    found = set()
    for name in os.listdir(_FOLDERS[0]):
        try:
            target = os.readlink(f"{_FOLDERS[0]}/{name}")
        except FileNotFoundError:  # It was closed meanwhile.
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
