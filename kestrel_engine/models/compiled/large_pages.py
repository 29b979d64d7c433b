"""Large pages on Linux: a processor finds addresses in them with less work, and reads weights and KV cache faster."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable, Iterator

from torch import Tensor

from ... import clock

_log = logging.getLogger(__name__)

PAGE_BYTES = 1 << 21
_PREFER = 14
"""MADV_HUGEPAGE: take large pages for what is written from now on, if they are permitted and free."""
_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: move a range to large pages now, if they are permitted and free."""


def prefer(pool: Tensor) -> None:
    """Asks for large pages for the memory of ``pool`` on a CPU, which nothing has written yet."""
    for first, count in _ranges([pool], 32):
        _advise(first, count, _PREFER)


def move(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of large ``tensors`` on a CPU to large pages where the system permits that.

    Returns the number of ranges that moved as a whole. Mapped files and most of what the system refuses stay as they
    are. The contents and addresses stay the same.
    """
    began = clock.now()
    moved = sum(_advise(first, count, _COLLAPSE) for first, count in _ranges(tensors, 2))
    if moved:
        _log.info("weights are in large pages after %.1f s", clock.now() - began)
    return moved


def _ranges(tensors: Iterable[Tensor], least: int) -> Iterator[tuple[int, int]]:
    """Whole large pages in tensors of at least ``least`` pages: the first page of a range, and their number."""
    pages = set[int]()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes >= least * PAGE_BYTES:
            begin = tensor.data_ptr()
            pages.update(range(-(-begin // PAGE_BYTES), (begin + tensor.nbytes) // PAGE_BYTES))
    for first in sorted(page for page in pages if page - 1 not in pages):
        end = first
        while end in pages:
            end += 1
        yield first, end - first


def _advise(first: int, count: int, advice: int) -> bool:
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(madvise(first * PAGE_BYTES, count * PAGE_BYTES, advice) == 0)
