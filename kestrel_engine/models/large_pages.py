"""Large pages for weights on Linux: a processor finds addresses in them with less work, and reads faster."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

from torch import Tensor

from .. import clock

_log = logging.getLogger(__name__)

PAGE_BYTES = 1 << 21
_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: move a range to large pages now, if they are permitted and free."""


def move(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of large ``tensors`` on a CPU to large pages where the system permits that.

    Returns the number of ranges that moved as a whole. Mapped files and most of what the system refuses stay as they
    are. The contents and addresses stay the same.
    """
    if sys.platform != "linux":
        return 0
    pages = set[int]()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes >= 2 * PAGE_BYTES:
            begin = tensor.data_ptr()
            pages.update(range(-(-begin // PAGE_BYTES), (begin + tensor.nbytes) // PAGE_BYTES))
    began, moved = clock.now(), 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for first in sorted(page for page in pages if page - 1 not in pages):
        end = first
        while end in pages:
            end += 1
        moved += madvise(first * PAGE_BYTES, (end - first) * PAGE_BYTES, _COLLAPSE) == 0
    if moved:
        _log.info("weights are in large pages after %.1f s", clock.now() - began)
    return moved
