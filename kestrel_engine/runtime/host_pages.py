"""How much of a tensor's memory the host has not given yet: it gives each page of it when the page is first written."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
from torch import Tensor


def untouched_bytes(tensor: Tensor) -> int:
    """Returns the bytes of ``tensor``'s memory that do not exist yet; all of them where the host reports nothing, and 0
    on a device."""
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return 0
    if sys.platform != "linux":
        return tensor.nbytes
    size = mmap.PAGESIZE
    begin = tensor.data_ptr() // size * size
    pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // size)
    present = np.empty(pages, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    if mincore(begin, pages * size, present.ctypes.data):
        return tensor.nbytes
    absent = pages - int((present & 1).sum())
    return min(absent * size, tensor.nbytes)
