"""log_progress: a callback that writes the progress of downloading and loading to the log."""

from __future__ import annotations

import logging

from .. import clock
from ..types.progress import Progress

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0


def log_progress(action: str) -> Progress:
    """Returns a callback that logs ``action`` with percentage and size, at most every _INTERVAL_S and at the end. It
    logs nothing if the work ends within the first interval."""
    started_at = last_at = clock.now()

    def report(done_bytes: int, total_bytes: int, name: str) -> None:
        nonlocal started_at, last_at
        now = clock.now()
        finished = total_bytes > 0 and done_bytes >= total_bytes
        if now - last_at < _INTERVAL_S and not (finished and last_at > started_at):
            return
        last_at = now
        if total_bytes > 0:
            percent = 100 * done_bytes // total_bytes
            sizes = f"{gib(done_bytes)} of {gib(total_bytes)}"
            logger.info("%s: %d %% (%s), %s", action, percent, sizes, name)
        else:
            logger.info("%s: %s, %s", action, gib(done_bytes), name)

    return report


def gib(size_bytes: int) -> str:
    """Formats a size: ``18.5 GiB``, ``21.0 MiB``."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.1f} GiB"
    return f"{size_bytes / 2**20:.1f} MiB"
