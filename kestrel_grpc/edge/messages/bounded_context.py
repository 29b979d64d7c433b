"""BoundedContext: a call's context that limits how long a write waits for a slow reader.

It uses one timer per stream instead of one per write. A stream writes for every token, and a timer costs more than the
rest of a write.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager
from typing import Any

from ..failures.errors import SlowReader


def bounded(context: Any, limit_s: float | None) -> AbstractContextManager[Any]:
    """``context`` with a limit on each write, for the time of a stream; ``context`` itself if ``limit_s`` is None."""
    if limit_s is None:
        return contextlib.nullcontext(context)
    return contextlib.closing(BoundedContext(context, limit_s))


class BoundedContext:
    """Wraps a call's ``context`` and replaces its ``write``. Allows one write at a time. Call ``close`` at the end."""

    def __init__(self, context: Any, limit_s: float) -> None:
        self._context, self._limit_s = context, limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[Any] | None = None
        """The task that is writing."""
        self._cancelling = 0
        self._began_at = 0.0
        self._is_slow = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Writes a message. gRPC accepts it at once unless the reader is behind by a window. Raises SlowReader."""
        self._writer = task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._cancelling, self._began_at = task.cancelling(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._check)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._is_slow or task.uncancel() > self._cancelling:
                raise
            raise SlowReader(
                f"the client did not read the stream for {self._limit_s:g} s; the server ended it"
            ) from None
        finally:
            self._writer = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Cancels a write that has reached the limit. Checks a younger write again when it can reach the limit."""
        self._timer = None
        if self._writer is None:
            return
        left = self._began_at + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
            return
        self._is_slow = True
        self._writer.cancel()
