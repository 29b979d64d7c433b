"""WatchedFiles: detects changes of files by modification time, size and inode."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kestrel_engine import clock

_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Watches ``paths``. Any thread may use it. ``interval_s``: least number of seconds between two checks."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        interval_s: float = 0.0,
    ) -> None:
        self._paths, self._interval_s = tuple(paths), interval_s
        self._checked_at = -float("inf")
        self._seen: _Stamp | None = None

    def changed(self) -> bool:
        """Whether a file has changed or disappeared since the last call. True for the first call."""
        now = clock.now()
        if now - self._checked_at < self._interval_s:
            return False
        self._checked_at = now
        stamp = tuple(_stamp(path) for path in self._paths)
        before, self._seen = self._seen, stamp
        return stamp != before


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
