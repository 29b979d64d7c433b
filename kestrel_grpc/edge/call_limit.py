"""CallLimit: how long the server lets a call take, or a part of it. Owns one timer for all calls.

All calls have the same limit, so the oldest is the first that reaches it. A timer for each would cost more than the
rest of what the edge does with a clock, and a cancelled one stays in the event loop's heap, with its task's context,
until the time that it was set for.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from kestrel_engine import DeadlineExceeded


def _too_long(limit_s: float) -> Exception:
    return DeadlineExceeded(f"the call took {limit_s:g} s, as long as this server lets any")


class CallLimit:
    """For one event loop. ``limit_s`` None lets calls take as long as they like. ``error`` makes what is raised."""

    def __init__(
        self, limit_s: float | None, error: Callable[[float], Exception] = _too_long
    ) -> None:
        self._limit_s, self._error = limit_s, error
        self._running: dict[asyncio.Task[Any], float] = {}
        """When each must have ended, by the event loop's clock; oldest first."""
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, response: Awaitable[Any]) -> Any:
        """Awaits ``response``, one at a time in a task. Raises DeadlineExceeded, or what ``error`` makes, when it takes
        longer than the limit."""
        if self._limit_s is None:
            return await response
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        loop = asyncio.get_running_loop()
        self._running[task] = ends_at = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(ends_at, self._look, loop, context=contextvars.Context())
        cancelling = task.cancelling()
        try:
            return await response
        except asyncio.CancelledError:
            if task not in self._expired or task.uncancel() > cancelling:
                raise
            raise self._error(self._limit_s) from None
        finally:
            self._running.pop(task, None)
            self._expired.discard(task)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels what has reached its time; looks again when the next may have."""
        self._timer = None
        now = loop.time()
        while self._running:
            task, ends_at = next(iter(self._running.items()))
            if ends_at > now:
                self._timer = loop.call_at(ends_at, self._look, loop, context=contextvars.Context())
                return
            del self._running[task]
            self._expired.add(task)
            task.cancel()
