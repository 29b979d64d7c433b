"""BatchRunner: answers the requests of batches, a few at one time. Owns the tasks that answer."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress

from kestrel_engine import EngineOverloaded, clock

from ..edge.call_life import CallLife
from .answering import Form, answer
from .store import BatchStore
from .tables import Waiting

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 60.0
_RETRY_S = 1.0
"""A caller whose request the server refused, because it is busy, waits so long."""
_LOOK_S = 1.0
_UNSTORED = (sqlite3.Error, EngineOverloaded)
"""What the store raises if the disk is full."""
OFF_PEAK_S = 60.0
"""It is off-peak if no other call has asked a model for so long."""


class BatchRunner:
    """``at_once``: the most requests at one time. ``num_asked``: returns how many calls have asked a model. The
    requests of batches do not count."""

    def __init__(self, store: BatchStore, at_once: int, num_asked: Callable[[], int]) -> None:
        self.store, self._at_once, self._num_asked = store, at_once, num_asked
        store.on_end = self._cancel
        self.forms: dict[str, Form] = {}
        """Of the requests that this server answers, by endpoint: other requests wait."""
        self.life: CallLife | None = None
        """Of the calls that answer requests. The server sets it before ``run``."""
        self._running: dict[asyncio.Task[None], Waiting] = {}
        """The tasks, with what they answer. A task that ends before its first step leaves it, too."""
        self._ended: set[str] = set()
        """The batches that have ended since the last claim began: it may have found requests of theirs."""
        self._paused: dict[str, float] = {}
        """The callers who wait, and until when."""
        self._called_at, self._num_known = clock.now(), 0
        self._wake = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    def _cancel(self, batch_id: str) -> None:
        """Ends the computation for a batch that has ended."""
        self._ended.add(batch_id)
        for task, request in self._running.items():
            if request.batch_id == batch_id:
                task.cancel()

    async def close(self) -> None:
        """Ends what ``run`` has begun, and closes the store. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._stop()
            await self.store.close()

    async def _stop(self) -> None:
        self.store.leave()  # First: the engine may need seconds to end a step.
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def run(self) -> None:
        """Answers until it is cancelled. What is then being answered is answered after the next start."""
        expires_at = 0.0
        try:
            while True:
                self._wake.clear()
                try:
                    if clock.now() >= expires_at:
                        await self.store.expire()
                        expires_at = clock.now() + EXPIRE_EVERY_S
                    await self._begin()
                except _UNSTORED as error:
                    logger.error("batches wait: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_S)
        finally:
            await self._stop()

    async def _begin(self) -> None:
        """Begins to answer as many requests as it may."""
        assert self.life is not None, "the server has set it"
        now = clock.now()
        self._paused = {owner: until for owner, until in self._paused.items() if until > now}
        most = self._at_once - len(self._running)
        if (num_asked := self._num_asked()) != self._num_known:
            self._called_at, self._num_known = now, num_asked
        quiet = now - self._called_at >= OFF_PEAK_S
        taken = {request.place for request in self._running.values()}
        self._ended.clear()
        claimed = await self.store.claim(most, self.forms, self._paused, taken, is_off_peak=quiet)
        for request in claimed:
            if request.batch_id in self._ended:
                continue
            task = asyncio.create_task(self._serve(request, self.life))
            self._running[task] = request
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request of a batch has no answer: %s", error, exc_info=error)

    def _pause(self, request: Waiting) -> None:
        self._paused[request.owner.name] = clock.now() + _RETRY_S

    async def _serve(self, request: Waiting, life: CallLife) -> None:
        try:
            given = await answer(request, self.forms[request.endpoint], life)
        except Exception:
            self._pause(request)
            raise
        if given.succeeded is None:
            return self._pause(request)
        names = {"id": f"{request.batch_id}_{request.number}", "custom_id": request.custom_id}
        parts = (b', "response": ', given.response, b', "error": ', given.error, b"}")
        line = b"".join((json.dumps(names).encode()[:-1], *parts))
        while True:
            try:
                return await self.store.answer(request, line, given.succeeded)
            except _UNSTORED as error:
                logger.error("the answer to a request of a batch waits: %s", error)
            await asyncio.sleep(_RETRY_S)
