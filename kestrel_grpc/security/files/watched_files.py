"""WatchedFiles: whether files changed since they were last read. Told by time, size and inode, not by contents."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Any thread. ``interval_s``: the files are looked at no more often."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._interval_s, self._clock = tuple(paths), interval_s, clock
        self._looked_at = -float("inf")
        self._seen: _Stamp | None = None

    def changed(self) -> bool:
        """Whether a file is another than at the last call, or this is the first one. A file that is gone is another."""
        now = self._clock()
        if now - self._looked_at < self._interval_s:
            return False
        self._looked_at = now
        stamp = tuple(_stamp(path) for path in self._paths)
        before, self._seen = self._seen, stamp
        return stamp != before


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
