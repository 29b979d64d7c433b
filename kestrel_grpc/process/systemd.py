"""Notifier: reports the server's state to systemd with datagrams, as sd_notify(3) describes.

It sends nothing if systemd did not start this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Sends messages to systemd. ``environ`` holds systemd's variables: its socket, and the watchdog's process and
    interval."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket, not a file
            self._address = "\0" + self._address[1:]
        is_watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        timeout_us = environ.get("WATCHDOG_USEC", "") if is_watched and self._address else ""
        self.interval_s = (
            int(timeout_us) / 2e6 if timeout_us.isdigit() and int(timeout_us) > 0 else None
        )
        """Seconds between two watchdog messages: half of systemd's timeout; None without a watchdog."""

    def send(self, *lines: str) -> None:
        """Sends a message. Logs an error instead of raising it."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("cannot send %s to systemd: %s", lines[0], error)

    async def keep_alive(self, has_failed: Callable[[], bool]) -> None:
        """Sends watchdog messages until the engine has failed or this task is cancelled. If the engine has failed, asks
        systemd to restart this process at once."""
        if self.interval_s is None:
            return
        while not has_failed():
            self.send("WATCHDOG=1")
            await asyncio.sleep(self.interval_s)
        self.send("WATCHDOG=trigger", "STATUS=the engine has died")
