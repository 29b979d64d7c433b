"""The files that protect the server: changes of them, and their permissions.

A file of tokens that every user may write is refused, because any user could add a token. A file that every user may
read causes a warning. The file of tokens holds hashes of 256 random bits, which do not reveal the tokens. Kubernetes
mounts secrets with mode 0644 by default, so refusing such a file would gain little.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from kestrel_engine import clock

from ..settings.security import SecurityConfig

_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Watches ``paths``. Any thread may use it. ``interval_s``: least number of seconds between two checks."""

    def __init__(self, paths: Sequence[str], *, interval_s: float = 0.0) -> None:
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


def writable_by_all(path: str) -> bool:
    """Whether every user may write the file. False if its mode cannot be read."""
    return bool(_mode(path) & stat.S_IWOTH)


def exposures(security: SecurityConfig) -> Iterator[str]:
    """A warning with a remedy for each file that every user of this machine may read."""
    if security.auth_tokens is not None and _readable_by_all(security.auth_tokens):
        yield (
            f"every user of this machine may read {security.auth_tokens} and so learn the principals and their scopes: "
            "chmod o-r (in Kubernetes defaultMode: 0440)"
        )
    if security.tls is not None and _readable_by_all(security.tls.private_key):
        yield (
            f"every user of this machine may read the private key {security.tls.private_key}: "
            "chmod o-r (in Kubernetes defaultMode: 0440), and replace the key if others had access"
        )


def _readable_by_all(path: str) -> bool:
    return bool(_mode(path) & stat.S_IROTH)


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0
