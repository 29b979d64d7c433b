"""Staging: a download that runs. Owns its folder, and says when it must end: too large, too slow, or not wanted."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from threading import Event

from ... import clock
from ...errors import AdapterUnavailable, AdapterUnfit, EngineClosed

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DOWNLOAD_S = 600.0
"""Seconds that the download of one adapter may take."""


class Staging:
    """``folder`` takes the files. ``make_room`` gets the bytes of the whole download before any of them is written.
    ``max_bytes``: of one adapter."""

    def __init__(
        self,
        name: str,
        folder: Path,
        closing: Event,
        max_bytes: int,
        make_room: Callable[[int], None],
    ) -> None:
        self.name, self.folder = name, folder
        self._closing, self._make_room = closing, make_room
        self.max_bytes = max_bytes
        self._reserved = 0
        self._ends_at = clock.now() + DOWNLOAD_S

    def reserve(self, num_bytes: int) -> None:
        """Makes room on the disk. Raises AdapterUnfit if the adapter never fits, and AdaptersFull."""
        if not 0 <= num_bytes <= self.max_bytes:
            raise AdapterUnfit(
                "adapter",
                f"{self.name!r} has {num_bytes} bytes; this server downloads adapters of at most {self.max_bytes}",
            )
        self._make_room(num_bytes)
        self._reserved = num_bytes

    def check(self, done_bytes: int = 0) -> None:
        """Raises if the download must end. ``done_bytes``: what has come so far."""
        if self._closing.is_set():
            raise EngineClosed("the engine was shut down")
        if done_bytes > self._reserved:
            raise AdapterUnavailable(f"{self.name!r} sent more bytes than it announced")
        if clock.now() > self._ends_at:
            raise AdapterUnavailable(
                f"{self.name!r} could not be downloaded within {DOWNLOAD_S:g} s; try again later"
            )
