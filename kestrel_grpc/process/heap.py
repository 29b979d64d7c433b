"""What the process no longer uses, given back to the system: glibc keeps what was freed within its heaps.

After messages of hundreds of megabytes it kept most of them for good; with malloc_trim they are back within seconds.
Without glibc nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

_EVERY_S = 2.0
_MUCH_BYTES = 32 * 1024 * 1024
"""Less is not worth the walk through the heaps, a few milliseconds."""


async def follow_heap(take_freed_bytes: Callable[[], int]) -> None:
    """Until cancelled. ``take_freed_bytes``: how much was freed since it was last asked."""
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
    """glibc's malloc_trim; ctypes lets other threads run meanwhile."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
