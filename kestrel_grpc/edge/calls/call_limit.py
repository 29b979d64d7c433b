"""CallLimit: limits the duration of calls, or of a part of them, with one timer for all.

All calls have the same limit, so the oldest call reaches it first. A timer for each call would cost more than all other
work of the edge with the clock. A cancelled timer also stays in the event loop's heap, with its task's context, until
its time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from kestrel_engine import DeadlineExceeded


def _too_long(limit_s: float) -> Exception:
    return DeadlineExceeded(f"the call took {limit_s:g} s, the limit of this server")


class CallLimit:
    """Limits durations on one event loop. ``limit_s``: seconds, None for no limit. ``error``: makes the exception."""

    def __init__(
        self, limit_s: float | None, error: Callable[[float], Exception] = _too_long
    ) -> None:
        self._limit_s, self._error = limit_s, error
        self._running: dict[asyncio.Task[Any], float] = {}
        """The end of each task's time by the event loop's clock; the oldest task first."""
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, response: Awaitable[Any]) -> Any:
        """Awaits ``response``. A task can await only one at a time. Raises DeadlineExceeded, or the exception that
        ``error`` makes, if it takes longer than the limit."""
        if self._limit_s is None:
            return await response
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        loop = asyncio.get_running_loop()
        self._running[task] = ends_at = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(ends_at, self._check, loop, context=contextvars.Context())
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

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels the tasks that have reached the limit. Checks again when the next task can reach it."""
        self._timer = None
        now = loop.time()
        while self._running:
            task, ends_at = next(iter(self._running.items()))
            if ends_at > now:
                self._timer = loop.call_at(
                    ends_at, self._check, loop, context=contextvars.Context()
                )
                return
            del self._running[task]
            self._expired.add(task)
            task.cancel()
