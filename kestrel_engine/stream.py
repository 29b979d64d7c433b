"""EngineStream: the caller's end of one request. Owns the request's undelivered updates; lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from .events import EngineResult, StreamUpdate


class EngineStream:
    """Async iterator of StreamUpdates, with the whole result at the end.

    Iteration may be skipped: ``result()`` alone works. Leaving early must be said: ``aclose()`` (or ``async with``)
    gives the request up and frees what it held; the result then says "cancelled" and has what there was. Undelivered
    updates are bounded by the request's own max_tokens.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._updates: deque[StreamUpdate] = deque()
        self._wake = asyncio.Event()
        self._result: asyncio.Future[EngineResult] = asyncio.get_running_loop().create_future()
        # A failure that nobody awaits is reported by the engine's log, not by the garbage collector.
        self._result.add_done_callback(lambda f: f.cancelled() or f.exception())

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        """The next update. Raises the request's error, or StopAsyncIteration after the last."""
        while not self._updates:
            if self._result.done():
                self._result.result()
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._updates.popleft()

    async def result(self) -> EngineResult:
        """Waits for the end; raises the request's error. May be called often, before, while or after iterating."""
        return await asyncio.shield(self._result)

    @property
    def done(self) -> bool:
        return self._result.done()

    async def aclose(self) -> None:
        """Gives the request up if it is unfinished, and waits until what it held is freed. Idempotent."""
        if not self._result.done():
            self._abort()
            await asyncio.wait([self._result])

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # The engine's side; all on the event loop.

    def push(self, update: StreamUpdate) -> None:
        self._updates.append(update)
        self._wake.set()

    def finish(self, result: EngineResult) -> None:
        if not self._result.done():
            self._result.set_result(result)
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        if not self._result.done():
            self._result.set_exception(error)
        self._wake.set()
