"""Returns freed memory to the system. glibc keeps most freed memory in its heaps.

After messages of hundreds of megabytes, glibc kept most of their memory for good. With malloc_trim, the system has it
back within seconds. Without glibc, this module does nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

_EVERY_S = 2.0
_MUCH_BYTES = 32 * 1024 * 1024
"""For less, a walk through the heaps is not worth its few milliseconds."""


async def follow_heap(take_freed_bytes: Callable[[], int]) -> None:
    """Trims the heaps until it is cancelled. ``take_freed_bytes``: returns the bytes freed since its last call."""
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
