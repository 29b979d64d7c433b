"""FlightRoom: bounds the bytes that are on the way to and from the shared store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kestrel_engine import clock

MOST_WAITING = 64


class RoomFull(Exception):
    """Too many operations wait, or this one has waited too long."""


class FlightRoom:
    """One owner may have half of ``max_bytes``, or one value. Operations that find no room wait."""

    def __init__(self, max_bytes: int, wait_s: float) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._wait_s = wait_s
        self._owners: Counter[str] = Counter()
        self._waiting: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def reserved(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Holds room for ``num_bytes``, at most ``max_bytes``. Raises RoomFull."""
        until = clock.now() + self._wait_s
        while not self._fits(owner, num_bytes):
            if len(self._waiting) >= MOST_WAITING or clock.now() >= until:
                raise RoomFull
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=until - clock.now())
            finally:
                self._waiting.discard(waiter)
        self._add(owner, num_bytes)
        try:
            yield
        finally:
            self._add(owner, -num_bytes)
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def _fits(self, owner: str, num_bytes: int) -> bool:
        own = self._owners.get(owner, 0)
        is_fair = not own or own + num_bytes <= self.max_bytes // 2
        return is_fair and self.used_bytes + num_bytes <= self.max_bytes

    def _add(self, owner: str, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._owners[owner] += num_bytes
        if not self._owners[owner]:
            del self._owners[owner]
