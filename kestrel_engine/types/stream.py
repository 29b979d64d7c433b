"""EngineStream: a caller's view of one request. Owns the request's unread updates; for the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from .events import EngineResult, SeenImage, StreamUpdate


class EngineStream:
    """Async iterator of StreamUpdates, with the whole result at the end.

    Iteration may be skipped: ``result()`` alone works. A caller that leaves early must call ``aclose()`` (or use
    ``async with``), which cancels the request and frees its resources. The result then has the reason "cancelled" and
    the output so far.
    All text that arrives between two reads is one update. Unread updates are bounded by the request's max_tokens.
    """

    def __init__(
        self,
        request_id: str,
        abort: Callable[[], None],
        complete: Callable[[EngineResult], EngineResult] | None = None,
        *,
        images: tuple[SeenImage, ...] = (),
        seed: int = 0,
    ) -> None:
        """``complete``: adds to the result what is known besides. ``images``, ``seed``: as in the result."""
        self.request_id, self.images, self.seed = request_id, images, seed
        self._abort, self._complete = abort, complete
        self.is_cancelled = False
        """``cancel`` was called. The request may have ended in another way before."""
        self._updates: deque[tuple[int, StreamUpdate]] = deque()
        self._outcome: EngineResult | BaseException | None = None
        # One future for each waiter: a shared future must be shielded from its waiters, which takes another future and
        # two more rounds of the event loop.
        self._readers: list[asyncio.Future[None]] = []
        self._enders: list[asyncio.Future[None]] = []

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        """The next update. Raises the request's error, or StopAsyncIteration after the last."""
        while not self._updates:
            if self._outcome is not None:
                self._ended()
                raise StopAsyncIteration
            await _new_waiter(self._readers)
        return self._joined()

    async def result(self) -> EngineResult:
        """Waits for the end; raises the request's error. May be called often, before, while or after iterating."""
        while self._outcome is None:
            await _new_waiter(self._enders)
        return self._ended()

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def cancel(self) -> None:
        """Ends the request as "cancelled", as soon as a step ends, if it is unfinished."""
        self.is_cancelled = True
        self._abort()

    async def aclose(self) -> None:
        """Cancels the request if it is unfinished, and waits until its resources are freed. Idempotent."""
        if self._outcome is None:
            self._abort()
        while self._outcome is None:
            await _new_waiter(self._enders)

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
        text, reasoning, tokens = first.text, first.reasoning, first.tokens
        if text or tokens:
            while waiting and (waiting[0][1].text or waiting[0][1].tokens):
                token_index, more = waiting.popleft()
                text += more.text
                tokens += more.tokens
        elif reasoning:
            while waiting and waiting[0][1].reasoning:
                token_index, more = waiting.popleft()
                reasoning += more.reasoning
        return StreamUpdate(
            self.request_id, token_index, text, reasoning, first.object, first.path, tokens
        )

    # The engine's side; all on the event loop.

    def push(self, updates: list[tuple[int, StreamUpdate]]) -> None:
        """Takes updates, each with the number of tokens generated when it was made."""
        self._updates.extend(updates)
        if self._readers:
            _wake(self._readers)

    def finish(self, result: EngineResult) -> None:
        self._end(result if self._complete is None else self._complete(result))

    def fail(self, error: BaseException) -> None:
        self._end(error)

    def _end(self, outcome: EngineResult | BaseException) -> None:
        if self._outcome is None:
            self._outcome = outcome
        for waiters in (self._readers, self._enders):
            if waiters:
                _wake(waiters)

    def _ended(self) -> EngineResult:
        """The result. Raises the request's error."""
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)
        assert outcome is not None, "ended"
        return outcome


def _new_waiter(waiters: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    """Done at the next ``_wake``."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    return waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
