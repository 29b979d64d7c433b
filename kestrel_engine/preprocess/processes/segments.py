"""Segments of memory that the server's process and its decoders share.

A segment is anonymous memory, passed as a file descriptor. It carries encoded bytes or pixels to a decoder, and crops
back. The server's process creates all segments. Its calls report a segment of the wrong size. It maps a segment only
after it has sealed it, so that the decoder can't shrink it.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import sys
import tempfile
import weakref
from typing import Any

import numpy as np

_MAPPED_BYTES = 128 * 1024
"""Less is copied, which takes no longer. A process may have 65,530 mappings (vm.max_map_count), and small images that
are kept for repeats would take them all."""

if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    _LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _MAP_FAILED = ctypes.c_void_p(-1).value


def new_segment() -> int:
    """Returns the descriptor of an empty segment. The caller must close it. On Linux the segment is in memory; on other
    systems it is a temporary file without a name. Raises OSError."""
    if sys.platform == "linux":
        return os.memfd_create("kestrel-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_segment(descriptor: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], written)


def read_segment(descriptor: int, into: np.ndarray) -> bool:
    """Fills a contiguous uint8 array with the first bytes of a segment. Returns False if the segment has fewer."""
    view = into.data.cast("B")
    read = 0
    while read < len(view):
        count = os.preadv(descriptor, [view[read:]], read)
        if count == 0:
            return False
        read += count
    return True


def map_segment(descriptor: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the first bytes of a segment as a uint8 array, a large one on Linux without a copy. Its memory outlives
    the descriptor. Raises ValueError if the segment has fewer bytes, and OSError if it can't be mapped.
    """
    size = math.prod(shape)
    if sys.platform != "linux" or size < _MAPPED_BYTES:
        array = np.empty(shape, np.uint8)
        if not read_segment(descriptor, array):
            raise ValueError(f"a segment of less than {shape}")
        return array
    # If the decoder shrank the segment later, SIGBUS would end this process.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    if os.fstat(descriptor).st_size < size:
        raise ValueError(f"a segment of less than {shape}")
    # mmap.mmap would keep a descriptor for each array. The pages are mapped when they are read: the kernel then maps
    # sixteen at once, which takes half as long as to map all of them here.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = _Mapping(address, size)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return np.asarray(memory).reshape(shape)


class _Mapping:
    """Memory as NumPy's array interface, which the arrays that read it keep. A ctypes array would need a type for each
    size, and types are reference cycles: they would stay until the garbage collector runs."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
