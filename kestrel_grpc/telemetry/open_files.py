"""Counts the open files and connections of this process. This module does not import OpenTelemetry.

Linux lists both in /proc/self. Other systems list open files in /dev/fd; there, connections are not counted.
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
"""Columns of the kernel's tables. Column 1 is the local address, with the port in hexadecimal."""


def file_limit() -> int | None:
    """Limit on open files of this process (RLIMIT_NOFILE); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files() -> int | None:
    """Number of open files of this process; None if the system does not report it."""
    for folder in _FOLDERS:
        try:
            return len(os.listdir(folder)) - 1  # listdir opens the folder itself.
        except OSError as error:
            if error.errno == errno.EMFILE:
                return file_limit()
    return None


def open_connections(ports: Iterable[int]) -> int | None:
    """Number of TCP connections that this process accepted on ``ports``; None if the system does not report it.

    Connections of other processes that share a port do not count.
    """
    wanted = {f"{port:04X}" for port in ports}
    try:
        own_inodes = _sockets()
        count = 0
        for table in _TABLES:
            with open(table, encoding="ascii") as lines:
                next(lines)
                for line in lines:
                    cells = line.split()
                    count += (
                        cells[_STATE] == _ESTABLISHED
                        and cells[1].rpartition(":")[2] in wanted
                        and cells[_INODE] in own_inodes
                    )
    except OSError:
        return None
    return count


def _sockets() -> set[str]:
    """Inodes of the sockets of this process. Raises OSError if the system has no /proc."""
    found = set()
    for name in os.listdir(_FOLDERS[0]):
        try:
            target = os.readlink(f"{_FOLDERS[0]}/{name}")
        except FileNotFoundError:  # The file has been closed since.
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
