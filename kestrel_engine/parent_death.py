"""Ends a child process when its parent process has gone, also when the parent was killed by SIGKILL.

The parent keeps one end of a pipe or socket pair and never writes to it; the child watches the other end. The kernel
closes the parent's end when the parent ends, however it ends. Loads no third-party package, so that a child can call it
first of all.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h."""


def end_with_parent(fd: int, *, after_s: float = 0.0, kernel_signal: bool = False) -> None:
    """Kills this process once the other end of ``fd`` is closed. Called by the child; returns at once.

    ``fd``: the read end of a pipe, or a socket, whose other end only the parent holds; this function reads nothing from
    it. Close the child's copy of the parent's end before this call, if the child was forked. ``after_s``: seconds that
    the child has to end by itself after the parent has gone.

    ``kernel_signal``: on Linux, let the kernel send SIGKILL as well (PR_SET_PDEATHSIG), at once. That works even where
    no Python code can run, for instance while an extension holds the interpreter. It has a trap: the kernel sends the
    signal when the *thread* that started the child ends, so pass True only for children that the parent's main thread
    starts. On other systems it has no effect.
    """
    if kernel_signal and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    # A parent that ended before prctl() sent no signal; the watcher sees its closed end all the same.
    threading.Thread(target=_watch, args=(fd, after_s), name="parent-watch", daemon=True).start()


def _watch(fd: int, after_s: float) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # The end of the other side is reported unasked, data is not.
    poller.poll()
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)
