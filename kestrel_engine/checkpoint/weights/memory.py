"""Determines the memory that is available for weights on a device or on the host, before they are loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...control_groups import CGROUPS, PROC, group_folders
from ...errors import InsufficientMemoryError
from ..progress import gib

if TYPE_CHECKING:
    import torch


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Of glibc's mallopt."""
_MIB = 2**20


@contextmanager
def returning_what_is_freed() -> Iterator[None]:
    """While the context is open, freed tensors of a MiB and more are given back to the system. glibc keeps them for
    later tensors, and a gigabyte of gaps remains between tensors that stay. After the context, glibc keeps tensors of
    up to 32 MiB, as it does in a process that has freed one."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        library.mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        library.malloc_trim(0)


def require_memory(needed_bytes: int, device: torch.device, *, what: str) -> None:
    """Raises InsufficientMemoryError if ``needed_bytes`` exceed the memory that ``device`` has available now."""
    available = device_available(device)
    if available is not None and needed_bytes > available:
        raise InsufficientMemoryError(
            f"{what} need {gib(needed_bytes)} of memory on {device}, {gib(available)} are available; "
            "use a narrower dtype (bfloat16), a smaller model, or a machine with more memory"
        )


def device_available(device: torch.device) -> int | None:
    """Returns the bytes that are available on a device; None if the platform does not report them. Counts torch's limit
    (torch.cuda.set_per_process_memory_fraction)."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Torch takes no device without an index here.
            index = torch.cuda.current_device() if device.index is None else device.index
            share = torch.cuda.get_per_process_memory_fraction(index)
            if share < 1:
                free = min(free, max(0, int(share * total) - torch.cuda.memory_reserved(device)))
        return free
    return host_available()


def host_available(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns the bytes that this process can still use on the host, within the limits of its control groups. File
    cache counts as available. On systems other than Linux, the result is the size of the free pages, or of all pages if
    the system does not report free ones."""
    names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    return _least(proc, cgroups, "MemAvailable:", names, whole=False)


def host_total(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns the bytes that this process can use on the host if no other process uses any."""
    return _least(proc, cgroups, "MemTotal:", ("SC_PHYS_PAGES",), whole=True)


def _least(
    proc: Path, cgroups: Path, key: str, names: tuple[str, ...], *, whole: bool
) -> int | None:
    limits = [
        _meminfo(proc / "meminfo", key),
        *(
            _bytes_of(folder, *names, whole)
            for folder in group_folders("memory", proc=proc, cgroups=cgroups)
            for names in _FILES
        ),
    ]
    known = [limit for limit in limits if limit is not None]
    if known:
        return max(0, min(known))
    for name in names:
        if name in os.sysconf_names:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _meminfo(file: Path, key: str) -> int | None:
    try:
        for line in file.read_text("ascii").splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of version 2, and of version 1."""


def _bytes_of(
    folder: Path, limit_name: str, usage_name: str, cache_name: str, whole: bool
) -> int | None:
    try:
        limit = (folder / limit_name).read_text("ascii").strip()
        if limit == "max":
            return None
        if whole:
            return int(limit)
        usage = int((folder / usage_name).read_text("ascii"))
        statistics = (folder / "memory.stat").read_text("ascii").splitlines()
        cache = next((int(s.split()[1]) for s in statistics if s.startswith(cache_name + " ")), 0)
        return int(limit) - usage + cache
    except (OSError, ValueError):
        return None
