"""How many multiprocessors persistent kernels take, and how many they leave to other work on the GPU.

A persistent kernel runs as long as all its tiles take, and kernels of other streams wait, whatever their priority is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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


def hopper_multiprocessors(device: torch.device) -> int:
    """Returns the multiprocessors of a Hopper GPU that are not spared; 0 for other devices, untested here."""
    return max(of_hopper(device) - spared(), 0)


@functools.cache
def of_hopper(device: torch.device) -> int:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
