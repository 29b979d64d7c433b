"""The settings of Python's interpreter in a server process, and the memory that it has freed."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable

GC_THRESHOLDS = (50_000, 20, 100)
"""A step creates a few objects for every row and drops them two steps later. With Python's default threshold of 700,
the collector runs several times per step at large batches and promotes objects that are about to be dropped. The few
cycles are still collected."""

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may hold the interpreter lock while another thread waits for it. Python's default of 5 ms is
longer than a step of a GPU. The step thread releases the lock whenever it waits for the device, and would get it back
too late."""

SPINS = "10000"
"""How often a thread of GNU's OpenMP looks for work before it sleeps: some 0.3 ms, longer than a pass leaves it without
work. By default it looks for some 6 ms, and takes cores from the threads for which it waits."""

_EVERY_S = 2.0
_MUCH_BYTES = 32 * 1024 * 1024
"""For less, a walk through the heaps is not worth its few milliseconds."""


def set_up_interpreter() -> None:
    """Sets the garbage collector's thresholds and the switch interval, and limits spinning.

    Call this before the engine is created.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limit_spinning()


def limit_spinning() -> None:
    """Sets `SPINS`, if the operator chose nothing. OpenMP's library reads them when torch loads it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


async def follow_heap(take_freed_bytes: Callable[[], int]) -> None:
    """Returns freed memory to the system until it is cancelled. ``take_freed_bytes``: returns the bytes freed since its
    last call.

    glibc keeps most freed memory in its heaps. With malloc_trim, the system has it back within seconds. Without glibc,
    this function does nothing.
    """
    trim = _trim()
    if trim is None:
        return
    freed = 0
    while True:
        await asyncio.sleep(_EVERY_S)
        freed += take_freed_bytes()
        if freed >= _MUCH_BYTES:
            freed = 0
            await asyncio.to_thread(trim, 0)


def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, or None. ctypes releases the interpreter lock during the call."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
