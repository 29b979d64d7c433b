"""BoundedContext: a call's context whose writes wait for a slow reader only so long.

One timer a stream, not one a write: a stream writes for every token, and a timer costs more than the rest of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .errors import SlowReader


class BoundedContext:
    """Everything but ``write`` is the call's own ``context``. One write at a time; ``close`` at the end."""

    def __init__(self, context: Any, limit_s: float) -> None:
        self._context, self._limit_s = context, limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[Any] | None = None
        """Who writes now."""
        self._cancelling = 0
        self._began_at = 0.0
        self._is_slow = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """gRPC takes a message at once until the reader is behind by a window. Raises SlowReader."""
        self._writer = task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._cancelling, self._began_at = task.cancelling(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._look)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._is_slow or task.uncancel() > self._cancelling:
                raise
            raise SlowReader(
                f"the stream was not read for {self._limit_s:g} s; it has been ended"
            ) from None
        finally:
            self._writer = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Cancels a write that has taken the limit; else looks again when it may have, or at the next write."""
        self._timer = None
        if self._writer is None:
            return
        left = self._began_at + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self._is_slow = True
        self._writer.cancel()
