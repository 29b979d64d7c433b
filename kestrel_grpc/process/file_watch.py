"""FileWatch: notices that the process is about to run out of files, of which each connection is one.

A process with as many files open as it may accepts no connection and can't even read a renewed certificate, so health
says so before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..telemetry.open_files import file_limit, open_files

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""How often the watch looks. Counting costs about 1 us for each open file."""
_CROWDED, _RELIEVED = 0.9, 0.8
"""Shares of the limit: from the first on health says NOT_SERVING, until fewer than the second are open."""
_COMPLAIN_EVERY_S = 60.0


class FileWatch:
    """``look`` is to be called every INTERVAL_S seconds. ``is_crowded`` changes there only."""

    def __init__(
        self,
        count: Callable[[], int | None] = open_files,
        limit: Callable[[], int | None] = file_limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._limit, self._clock = count, limit, clock
        self._complained_at = -float("inf")
        self.is_crowded = False
        """Whether the process is about to run out of files."""

    def look(self) -> bool:
        """Whether ``is_crowded`` changed. Logs once a minute while it holds."""
        opened, limit = self._count(), self._limit()
        if opened is None or limit is None:
            return False
        before = self.is_crowded
        self.is_crowded = opened >= (_RELIEVED if before else _CROWDED) * limit
        if self.is_crowded and self._clock() - self._complained_at >= _COMPLAIN_EVERY_S:
            self._complained_at = self._clock()
            logger.error(
                "%d of at most %d files are open, connections among them: health says NOT_SERVING, and soon no "
                "connection can be accepted; raise the limit (ulimit -n, LimitNOFILE= of systemd) or bound connections "
                "(docs/security.md)",
                *(opened, limit),
            )
        if before and not self.is_crowded:
            logger.warning("%d of at most %d files are open again", opened, limit)
        return self.is_crowded is not before
