"""The requests of one call beside each other: how many may wait or run at a time, and that all end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """Turns for ``most`` sequences of one call at a time, in the order in which they are asked for."""

    def __init__(self, most: int) -> None:
        self._free, self._taking = asyncio.Semaphore(most), asyncio.Lock()

    @asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[None]:
        """A context in which ``count`` more sequences may wait or run."""
        taken = 0
        try:
            async with self._taking:
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


async def all_of(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all runs. If one raises, or the call is cancelled, all end.

    This is no TaskGroup: in Python 3.11, the task of a group that failed looks cancelled from then on, and gRPC sends
    no status for a cancelled handler.
    """
    running = [asyncio.create_task(run) for run in runs]
    try:
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()  # Raises the exception, if there is one; the others may not have ended.
        return [task.result() for task in running]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
