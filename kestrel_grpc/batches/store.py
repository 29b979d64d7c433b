"""BatchStore: the files and batches of callers, in one SQLite file. Owns what is stored, and the state of each request.

A request is answered once its line is stored, and its line is stored once. What was being answered when the process
ended is answered again after the next start. A thread of its own runs all statements, one transaction after the other.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Any, TypeVar

from kestrel_engine import ConfigError, EngineOverloaded, InvalidRequest, clock

from ..security.identity.principal import Principal
from ..settings.batches import BatchesConfig
from .tables import MOST_FILES, Arriving, NewBatch, Place, Result, Tables, Waiting, full, places

_T = TypeVar("_T")


ReadRequests = Callable[[bytes, str], tuple[list[tuple[str, bytes]], list[dict[str, Any]]]]
"""From a file and an endpoint to the ids and bodies of requests, and what is wrong with the lines."""


class BatchStore:
    """Raises ConfigError if the file cannot be used, or another process uses it."""

    def __init__(self, config: BatchesConfig) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-batches")
        try:
            self._tables = self._thread.submit(Tables, config).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError("batches", config.path or "", f"cannot be used: {error}") from None
        self.changed = asyncio.Event()
        """Set at the next change, when another takes its place."""
        self.on_end: Callable[[str], None] = lambda batch_id: None
        """Called with each batch that has ended, or is deleted."""
        self.is_left = False
        """Whether nobody answers requests any more."""

    def leave(self) -> None:
        """Nobody answers requests any more."""
        self.is_left = True
        self.changed.set()

    async def close(self) -> None:
        await self._run(self._tables.db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _change(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` as one transaction. Raises EngineOverloaded if the file can't be written."""

        loop = asyncio.get_running_loop()

        def change() -> _T:
            self._tables.ended = []
            try:
                with self._tables.db:
                    self._tables.db.execute("BEGIN IMMEDIATE")
                    made = work()
            except sqlite3.OperationalError as error:
                why = f"files and batches can't be stored: {error}; try again later"
                raise EngineOverloaded(why, retry_after_s=60) from None
            # Also if nobody waits for the change any more.
            loop.call_soon_threadsafe(self._tell, self._tables.ended)
            return made

        return await self._run(change)

    def _tell(self, ended: list[str]) -> None:
        for batch_id in ended:
            self.on_end(batch_id)
        self.changed.set()
        if not self.is_left:
            self.changed = asyncio.Event()

    # Files

    async def add_file(self, owner: Principal, name: str, content: bytes) -> dict[str, Any]:
        """Raises EngineOverloaded if the caller has too many files or bytes."""

        def add() -> dict[str, Any]:
            self._tables.check_share(owner.name, len(content))
            held = self._tables.one("SELECT count(*) FROM files WHERE owner = ?", owner.name)[0]
            if held >= MOST_FILES:
                raise full(owner.name, "files", held, MOST_FILES)
            return self._tables.file(
                self._tables.insert_file(owner.name, "batch", name, len(content), content)
            )

        return await self._change(add)

    async def files(self, owner: Principal, after: str, limit: int) -> list[dict[str, Any]]:
        """As ``batches``."""
        tables = self._tables
        return await self._run(
            lambda: [tables.file(each) for each in tables.page("files", owner, after, limit)]
        )

    async def file(self, owner: Principal, file_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next ones."""
        return await self._run(
            lambda: self._tables.file(self._tables.owned("files", owner, file_id)["id"])
        )

    async def delete_file(self, owner: Principal, file_id: str) -> None:
        def delete() -> None:
            file = self._tables.owned("files", owner, file_id)
            self._tables.db.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if file["batch_id"] is not None:
                self._tables.db.execute(
                    "DELETE FROM requests WHERE batch_id = ? AND succeeded = ?",
                    (file["batch_id"], file["succeeded"]),
                )

        await self._change(delete)

    async def content(self, owner: Principal, file_id: str) -> AsyncIterator[bytes]:
        """The content of a file, in pieces."""
        at = 0
        while True:
            read = functools.partial(self._tables.piece, owner, file_id, at)
            piece, at = await self._run(read)
            if not piece:
                return
            yield piece

    # Batches

    async def add_batch(
        self, owner: Principal, asked: NewBatch, read: ReadRequests
    ) -> dict[str, Any]:
        """A batch whose file is invalid has failed. Raises StoredNotFound, EngineOverloaded."""

        def add() -> dict[str, Any]:
            file = self._tables.owned("files", owner, asked.input_file_id, "input_file_id")
            if file["batch_id"] is not None:
                raise InvalidRequest("input_file_id", "is an output; upload the requests as a file")
            self._tables.check_share(owner.name, file["bytes"])
            self._tables.check_open(owner)
            query = "SELECT content FROM files WHERE id = ?"
            content: bytes = self._tables.one(query, file["id"])[0]
            requests, errors = read(content, asked.endpoint)
            batch = Arriving(owner, bytes=file["bytes"], total=len(requests))
            self._tables.insert_batch(batch, asked, errors)
            if not errors:
                self._tables.insert_requests(batch.batch_id, 0, requests)
            return self._tables.batch(batch.batch_id)

        return await self._change(add)

    async def add_requests(self, batch: Arriving, requests: Sequence[tuple[str, bytes]]) -> None:
        """The next requests of a batch: their ids and bodies. Raises EngineOverloaded."""

        def add() -> None:
            more = sum(len(body) for _, body in requests)
            self._tables.check_share(batch.owner.name, more)
            self._tables.check_open(batch.owner)
            self._tables.insert_requests(batch.batch_id, batch.total, requests)
            batch.bytes, batch.total = batch.bytes + more, batch.total + len(requests)
            self._tables.arriving[batch.batch_id] = batch

        await self._change(add)

    async def start_batch(self, batch: Arriving, asked: NewBatch) -> dict[str, Any]:
        """The batch, whose requests are there. Raises InvalidRequest, EngineOverloaded."""

        def start() -> dict[str, Any]:
            query = (
                "SELECT custom_id FROM requests WHERE batch_id = ? GROUP BY 1 HAVING count(*) > 1"
            )
            if (twice := self._tables.one(query, batch.batch_id)) is not None:
                raise InvalidRequest("request.custom_id", f"{twice[0]!r} stands twice")
            self._tables.check_open(batch.owner)
            self._tables.insert_batch(batch, asked, [])
            self._tables.arriving.pop(batch.batch_id, None)
            return self._tables.batch(batch.batch_id)

        return await self._change(start)

    async def drop(self, batch: Arriving) -> None:
        """Deletes a batch whose caller does not get its id. Idempotent. No cancellation stops it."""

        def drop() -> None:
            self._tables.arriving.pop(batch.batch_id, None)
            self._tables.delete_batch(batch.batch_id)

        await asyncio.shield(self._change(drop))

    async def batches(self, owner: Principal, after: str, limit: int) -> list[dict[str, Any]]:
        """Newest first. ``after``: the id of the last one that the caller knows; "" for the first ones. Raises
        StoredNotFound."""
        tables = self._tables
        return await self._run(
            lambda: [tables.batch(each) for each in tables.page("batches", owner, after, limit)]
        )

    async def batch(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next one."""
        return await self._run(
            lambda: self._tables.batch(self._tables.owned("batches", owner, batch_id)["id"])
        )

    async def cancel(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Ends a batch. Its answers so far are kept."""

        def cancel() -> dict[str, Any]:
            if self._tables.owned("batches", owner, batch_id)["ended_at"] is None:
                self._tables.end(batch_id, "cancelled")
            return self._tables.batch(batch_id)

        return await self._change(cancel)

    async def delete_batch(self, owner: Principal, batch_id: str) -> None:
        """Deletes a batch and its results. Raises StoredNotFound."""

        def delete() -> None:
            self._tables.owned("batches", owner, batch_id)
            self._tables.delete_batch(batch_id)

        await self._change(delete)

    async def results(
        self, owner: Principal, batch_id: str, at: int
    ) -> tuple[dict[str, Any], list[Result]]:
        """The batch, and some of its answers from number ``at`` on, up to the first one that is not there yet. Raises
        StoredNotFound."""

        def results() -> tuple[dict[str, Any], list[Result]]:
            batch = self._tables.batch(self._tables.owned("batches", owner, batch_id)["id"])
            return batch, self._tables.results(batch_id, at)

        return await self._run(results)

    # Answering

    async def claim(
        self,
        most: int,
        endpoints: Collection[str],
        paused: Collection[str] = (),
        taken: Collection[Place] = (),
        *,
        is_off_peak: bool = True,
    ) -> list[Waiting]:
        """Up to ``most`` requests to ``endpoints`` to answer next, callers in turn, the oldest batch of each first.
        ``paused``: callers without a turn. ``taken``: requests that are being answered. ``is_off_peak``: also of
        batches that wait for that."""
        if most <= 0:
            return []
        owners = (
            "SELECT DISTINCT owner FROM batches WHERE ended_at IS NULL "
            f"AND owner NOT IN ({places(paused)})"
        )

        def claim() -> list[Waiting]:
            tables = self._tables
            names = [row[0] for row in tables.db.execute(owners, (*paused,)).fetchall()]
            lists = [tables.waiting(each, most, endpoints, taken, is_off_peak) for each in names]
            turns = chain.from_iterable(zip_longest(*lists))
            found = [each for each in turns if each is not None][:most]
            query = "SELECT body FROM requests WHERE batch_id = ? AND number = ?"
            return [each._replace(body=tables.one(query, *each.place)[0]) for each in found]

        return await self._run(claim)

    async def answer(self, request: Waiting, line: bytes, succeeded: bool) -> None:
        """Stores the answer to a request, unless its batch has ended. The last one ends the batch."""

        def answer() -> None:
            key = request.place
            stored = self._tables.db.execute(
                "UPDATE requests SET line = ?, succeeded = ?, body = NULL "
                "WHERE batch_id = ? AND number = ? AND line IS NULL",
                (line, succeeded, *key),
            )
            if not stored.rowcount:
                return
            counter = "completed" if succeeded else "failed"
            query = f"UPDATE batches SET {counter} = {counter} + 1, bytes = bytes + ? WHERE id = ?"
            self._tables.db.execute(query, (len(line), key[0]))
            query = "SELECT total - completed - failed FROM batches WHERE id = ?"
            if self._tables.one(query, key[0])[0] == 0:
                self._tables.end(key[0], "completed")
            else:
                self._tables.end_if_full(request)

        await self._change(answer)

    async def expire(self) -> None:
        """Ends the batches whose time is over, and deletes what is kept no longer."""

        def expire() -> None:
            now = int(clock.wall())
            late = "SELECT id FROM batches WHERE ended_at IS NULL AND expires_at <= ?"
            for (batch_id,) in self._tables.db.execute(late, (now,)).fetchall():
                self._tables.end(batch_id, "expired")
            old = "SELECT id FROM batches WHERE ended_at IS NOT NULL AND kept_until <= ?"
            for (batch_id,) in self._tables.db.execute(old, (now,)).fetchall():
                self._tables.delete_batch(batch_id)
            self._tables.db.execute("DELETE FROM files WHERE expires_at <= ?", (now,))

        await self._change(expire)
