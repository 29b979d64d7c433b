"""Determines the memory that is available for weights on a device or on the host, before they are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InsufficientMemoryError
from ..progress import gib

if TYPE_CHECKING:
    import torch


def require_memory(needed_bytes: int, device: torch.device, *, what: str) -> None:
    """Raises InsufficientMemoryError if ``needed_bytes`` exceed the memory that ``device`` has available now."""
    available = device_available(device)
    if available is not None and needed_bytes > available:
        raise InsufficientMemoryError(
            f"{what} need {gib(needed_bytes)} of memory on {device}, {gib(available)} are available; "
            "use a narrower dtype (bfloat16), a smaller model, or a machine with more memory"
        )


def device_available(device: torch.device) -> int | None:
    """Returns the bytes that are available on a device; None if the platform does not report them.

    A limit on torch's memory in this process (torch.cuda.set_per_process_memory_fraction) counts.
    """
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            share = torch.cuda.get_per_process_memory_fraction(device)
            if share < 1:
                free = min(free, max(0, int(share * total) - torch.cuda.memory_reserved(device)))
        return free
    return host_available()


def host_available(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the bytes that this process can still use on the host, within the limits of its control groups.

    File cache counts as available, because the kernel frees it on demand. On systems other than Linux, the result is
    the size of the free pages, or of all pages if the system does not report free ones.
    """
    limits = [_meminfo(proc / "meminfo"), *_cgroup_limits(proc / "self/cgroup", cgroups)]
    known = [limit for limit in limits if limit is not None]
    if known:
        return max(0, min(known))
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if name in os.sysconf_names:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _meminfo(file: Path) -> int | None:
    try:
        for line in file.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup_limits(membership: Path, root: Path) -> list[int | None]:
    """Returns the bytes left in each control group (version 1 or 2), from the process's own group up to the root."""
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return []
    out: list[int | None] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        folder = base / group.lstrip("/")
        # In a container, the path may be the host's, which isn't mounted. Then the root is the process's own group.
        for candidate in (folder, *folder.parents):
            out.append(_bytes_left(candidate, *names))
            if candidate == base:
                break
    return out


def _bytes_left(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text("ascii").strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text("ascii"))
        statistics = (folder / "memory.stat").read_text("ascii").splitlines()
        cache = next((int(s.split()[1]) for s in statistics if s.startswith(cache_name + " ")), 0)
        return int(limit) - usage + cache
    except (OSError, ValueError):
        return None
