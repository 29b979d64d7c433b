"""Upkeep: what a server does beside its calls while it runs: it watches open files, freed memory and connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..security.admission.guard import Guard
from .file_watch import INTERVAL_S, FileWatch
from .heap import follow_heap


class Upkeep:
    """Call ``start`` and ``stop`` on one event loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._files = guard, FileWatch()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_crowded(self) -> bool:
        """As of FileWatch."""
        return self._files.is_crowded

    def start(self, changed: Callable[[], None]) -> None:
        """``changed``: called when ``is_crowded`` has changed."""
        self._tasks = [
            asyncio.create_task(self._watch_files(changed)),
            asyncio.create_task(follow_heap(self._guard.take_freed_bytes)),
            asyncio.create_task(self._guard.connections.run()),
        ]

    def stop(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _watch_files(self, changed: Callable[[], None]) -> None:
        while True:
            if self._files.check():
                changed()
            await asyncio.sleep(INTERVAL_S)
