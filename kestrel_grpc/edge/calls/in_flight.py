"""InFlight: the number of calls in progress."""

from __future__ import annotations

import asyncio


class InFlight:
    """Counts the calls in progress, so that a stopping server can wait for their end."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *exc_info: object) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits for the end of all calls. Returns whether they ended within ``timeout_s`` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
