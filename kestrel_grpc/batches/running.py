"""BatchRunner: answers the requests of batches, a few at one time. Owns the tasks that answer."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import orjson

from kestrel_engine import clock

from .store import BatchStore, Waiting

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 60.0
_RETRY_S = 1.0
_LOOK_S = 5.0


class Answer(NamedTuple):
    """``status``: of HTTP; None if the server is busy or starts, and the request waits on. ``body``: JSON."""

    status: int | None
    request_id: str
    body: bytes


class BatchRunner:
    """``at_once``: the most requests at one time."""

    def __init__(self, store: BatchStore, at_once: int) -> None:
        self.store, self._at_once = store, at_once
        self.answer: Callable[[Waiting], Awaitable[Answer]] | None = None
        """Gives the answer to a request. The HTTP port sets it."""
        self._running: dict[asyncio.Task[None], str] = {}
        """The tasks, with the batches of their requests."""
        self._wake = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Ends the computation for a batch that has ended."""
        for task, its_batch in self._running.items():
            if its_batch == batch_id:
                task.cancel()

    async def close(self) -> None:
        """Ends what ``run`` has begun, and closes the store. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._stop()
            await self.store.close()

    async def _stop(self) -> None:
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
                    for request in await self.store.claim(self._at_once - len(self._running)):
                        task = asyncio.create_task(self._serve(request))
                        self._running[task] = request.batch_id
                        task.add_done_callback(self._done)
                except sqlite3.Error as error:  # The disk may be full.
                    logger.error("batches wait: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_S)
        finally:
            await self._stop()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request of a batch has no answer: %s", error, exc_info=error)

    async def _serve(self, request: Waiting) -> None:
        try:
            assert self.answer is not None, "the port has opened"
            while (answer := await self.answer(request)).status is None:
                await asyncio.sleep(_RETRY_S)
            response = {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": orjson.Fragment(answer.body),
            }
            line = {
                "id": f"{request.batch_id}_{request.number}",
                "custom_id": request.custom_id,
                "response": response,
                "error": None,
            }
            stored = orjson.dumps(line)
            while True:
                try:
                    return await self.store.answer(request, stored, answer.status == 200)
                except sqlite3.Error as error:  # The disk may be full.
                    logger.error("the answer to a request of a batch waits: %s", error)
                await asyncio.sleep(_RETRY_S)
        except asyncio.CancelledError:
            await self.store.give_back(request)
            raise
