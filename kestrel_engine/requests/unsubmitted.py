"""Unsubmitted: the requests that are accepted and not submitted yet. Owns their number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .. import clock
from ..errors import DeadlineExceeded
from .queue_places import QueuePlace, until_displaced

_Result = TypeVar("_Result")


class Unsubmitted:
    """``on_end`` is called after each wait. Between two waits, and before its submission, a request does not count; no
    other task runs in between."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def run(
        self, awaited: Awaitable[_Result], place: QueuePlace, deadline_at: float | None, what: str
    ) -> _Result:
        """The result of ``awaited`` for a request. Raises Displaced if the request loses its place meanwhile, and
        DeadlineExceeded: the deadline passed ``what``."""
        left_s = None if deadline_at is None else deadline_at - clock.now()
        self._count += 1
        try:
            async with asyncio.timeout(left_s):
                return await until_displaced(place, awaited)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed {what}") from None
        finally:
            self._count -= 1
            self._on_end()
