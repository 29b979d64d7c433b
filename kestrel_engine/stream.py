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
    gives the request up and frees what it held; the result then says "cancelled" and has what there was. Text that came
    since the last update was taken is one update. Undelivered updates are bounded by the request's own max_tokens.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._updates: deque[tuple[int, StreamUpdate]] = deque()
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
        return self._joined()

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

    def _joined(self) -> StreamUpdate:
        """The next update, with all text or all reasoning that follows it."""
        waiting = self._updates
        token_index, first = waiting.popleft()
        text, reasoning = first.text, first.reasoning
        if text:
            while waiting and waiting[0][1].text:
                token_index, more = waiting.popleft()
                text += more.text
        elif reasoning:
            while waiting and waiting[0][1].reasoning:
                token_index, more = waiting.popleft()
                reasoning += more.reasoning
        return StreamUpdate(self.request_id, token_index, text, reasoning, first.object, first.path)

    # The engine's side; all on the event loop.

    def push(self, updates: list[tuple[int, StreamUpdate]]) -> None:
        """Takes updates, each with the number of tokens generated when it was made."""
        self._updates.extend(updates)
        self._wake.set()

    def finish(self, result: EngineResult) -> None:
        if not self._result.done():
            self._result.set_result(result)
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        if not self._result.done():
            self._result.set_exception(error)
        self._wake.set()
