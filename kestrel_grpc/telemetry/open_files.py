"""Counts the open files of this process. This module does not import OpenTelemetry.

Linux lists them in /proc/self/fd, other systems in /dev/fd.
"""

from __future__ import annotations

import errno
import os
import resource

_FOLDERS = ("/proc/self/fd", "/dev/fd")


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
