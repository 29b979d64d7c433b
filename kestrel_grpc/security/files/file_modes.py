"""Which users of this machine may read or change the files that protect the server. Owns the decision.

A file of tokens or a private key that every user may write is refused: anyone could let himself in. One that every
user may read is warned of. The file of tokens holds hashes of 256 random bits, which give no token away, and
Kubernetes mounts secrets with mode 0644 unless the manifest says otherwise, so refusing it would gain little. For a
private key the warning says that the key must be replaced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ...settings.security import SecurityConfig


def writable_by_all(path: str) -> bool:
    """False for a file that can't be looked at."""
    return bool(_mode(path) & stat.S_IWOTH)


def exposures(security: SecurityConfig) -> Iterator[str]:
    """One sentence with a remedy for each file that every user of this machine may read."""
    if security.auth_tokens is not None and _readable_by_all(security.auth_tokens):
        yield (
            f"every user of this machine may read {security.auth_tokens} and learn who has which access: "
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
