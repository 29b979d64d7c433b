"""Multiprocessors that persistent kernels leave to other work on the GPU.

A persistent kernel has one program for each multiprocessor, and runs as long as all its tiles take. Kernels of another
stream wait until then, whatever their priority is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


def spared() -> int:
    """Returns the number of multiprocessors that kernels which this thread launches now leave free."""
    return int(getattr(_thread, "count", 0))


@contextmanager
def sparing(count: int) -> Iterator[None]:
    """Inside the context, and in this thread, persistent kernels leave ``count`` multiprocessors free."""
    before = spared()
    _thread.count = count
    try:
        yield
    finally:
        _thread.count = before
