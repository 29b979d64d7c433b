"""The limit on open files of this process. Each connection is an open file.

At the start the limit is raised as far as the system allows, and compared with the connections that the settings allow.
At the limit, a process cannot accept connections or read a renewed certificate. FileWatch detects that the process is
about to reach it, and health reports NOT_SERVING before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
from collections.abc import Callable

from kestrel_engine import clock

from ..settings.server import ServerConfig
from ..telemetry.open_files import file_limit, open_files

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between checks. A check takes about 1 us for each open file."""
CROWDED, _RELIEVED = 0.9, 0.8
"""Shares of the limit. Health reports NOT_SERVING from the first share on, until the number falls below the second."""
_LOG_EVERY_S = 60.0
_OTHERS = 128
"""Files of a server without connections: sockets, pipes of decoders, the log, files of the model while it loads."""
_MOST = 10_240
"""The highest limit on macOS, whose hard limit may be infinite."""


def raise_limit() -> None:
    """Raises the soft limit to the hard one. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MOST):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def complaint(config: ServerConfig) -> str | None:
    """Says what to do if the connections of ``config`` do not fit the limit."""
    most = config.security.connections.connections
    ports = bool(config.listen) + bool(config.http.http_listen)
    needed = math.ceil(((most or 0) * ports + _OTHERS) / CROWDED)
    limit = file_limit()
    if limit is None or needed <= limit:
        return None
    cause = f"--max-connections {most}" if most and ports else "the server"
    both = ", for gRPC and for HTTP," if most and ports == 2 else ""
    return (
        f"{cause}{both} may need {needed} open files, and this process may open {limit}: raise the hard "
        f"limit (ulimit -Hn {needed}, systemd's LimitNOFILE={needed}) or lower the number"
    )


class FileWatch:
    """Only ``check`` changes ``is_crowded``."""

    def __init__(
        self,
        count: Callable[[], int | None] = open_files,
        limit: Callable[[], int | None] = file_limit,
    ) -> None:
        self._count, self._limit = count, limit
        self._logged_at = -float("inf")
        self.is_crowded = False
        """Whether the process is about to reach its limit on open files."""

    async def follow(self, changed: Callable[[], None]) -> None:
        """Checks until it is cancelled. ``changed``: called when ``is_crowded`` has changed."""
        while True:
            if self.check():
                changed()
            await asyncio.sleep(INTERVAL_S)

    def check(self) -> bool:
        """Updates ``is_crowded`` and returns whether it changed. Logs once a minute while it is true."""
        opened, limit = self._count(), self._limit()
        if opened is None or limit is None:
            return False
        before = self.is_crowded
        self.is_crowded = opened >= (_RELIEVED if before else CROWDED) * limit
        if self.is_crowded and clock.now() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = clock.now()
            logger.error(
                "%d of at most %d files are open, including connections: health reports NOT_SERVING, and the server "
                "may soon accept no connection; raise the limit (ulimit -n, systemd's LimitNOFILE=) or limit "
                "connections (docs/run/security.md)",
                *(opened, limit),
            )
        if before and not self.is_crowded:
            logger.warning(
                "%d of at most %d files are open: below the threshold again", opened, limit
            )
        return self.is_crowded is not before
