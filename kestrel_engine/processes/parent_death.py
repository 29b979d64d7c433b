"""Ends a child process when its parent process has ended, even if SIGKILL ended the parent.

The parent keeps one end of a pipe or socket pair open and never writes to it. The child watches the other end. When the
parent ends for any reason, the kernel closes the parent's end. This module imports no third-party package, so a child
process can call it before anything else.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h."""


def end_with_parent(fd: int, *, kernel_signal: bool = False) -> None:
    """Kills this process once the other end of ``fd`` is closed. The child calls this function; it returns at once.

    ``fd``: the read end of a pipe, or a socket. Only the parent may hold the other end, so a forked child must close
    its copy of that end before this call. This function reads no data from ``fd``.

    ``kernel_signal``: on Linux, ask the kernel to send SIGKILL as well, without delay (PR_SET_PDEATHSIG). The signal
    also works while no Python code can run, for instance while an extension holds the interpreter. The kernel sends the
    signal when the *thread* that started the child ends, so pass True only if the parent's main thread starts the
    child. On other systems the argument has no effect. Raises OSError if the kernel refuses the request.
    """
    if kernel_signal and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    # A parent that ended before the call of prctl() causes no signal. The watcher still sees the closed pipe.
    threading.Thread(target=_watch, args=(fd,), name="parent-watch", daemon=True).start()


def _watch(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # With an empty mask, poll() reports a closed other end and no data.
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
