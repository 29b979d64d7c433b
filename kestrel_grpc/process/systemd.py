"""What systemd is told of the server: ready, stopping, still alive. One datagram each, as sd_notify(3) describes.

Nothing is sent where systemd didn't start us.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """``environ``: where systemd says its socket, and how often it wants to hear from whom."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # in the kernel's name space, not in the file system
            self._address = "\0" + self._address[1:]
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        wanted = environ.get("WATCHDOG_USEC", "") if ours and self._address else ""
        self.interval_s = int(wanted) / 2e6 if wanted.isdigit() and int(wanted) > 0 else None
        """Seconds between two signs of life: half of what systemd waits; None if it wants none."""

    def tell(self, *lines: str) -> None:
        """Never raises: what systemd makes of silence is its own to decide."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("systemd can't be told %s: %s", lines[0], error)

    async def keep_alive(self, has_failed: Callable[[], bool]) -> None:
        """Signs of life until the engine has failed or this task is cancelled. Then systemd is to restart us at once: a
        dead engine answers nobody any more."""
        if self.interval_s is None:
            return
        while not has_failed():
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.interval_s)
        self.tell("WATCHDOG=trigger", "STATUS=the engine has died")
