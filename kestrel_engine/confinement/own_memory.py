"""The memory of this process as the kernel counts it, from a file that stays open while no path leads to one."""

from __future__ import annotations

import mmap
import os


def open_count() -> int:
    """Opens the count. Returns its descriptor, or -1 on a system without /proc."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def read_count(descriptor: int) -> tuple[int, int]:
    """Returns the bytes of address space, and of private memory as RLIMIT_DATA counts it. Raises OSError."""
    pages = os.pread(descriptor, 200, 0).split()
    return int(pages[0]) * mmap.PAGESIZE, int(pages[5]) * mmap.PAGESIZE
