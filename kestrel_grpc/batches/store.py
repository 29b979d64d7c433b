"""BatchStore: the files and batches of callers, in one SQLite file. Owns what is stored, and the state of each request.

A request is answered once its line is stored, and its line is stored once. What was being answered when the process
ended is answered again after the next start. A thread of its own runs all statements, one transaction after the other.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Any, Concatenate, ParamSpec, TypeVar

from kestrel_engine import ConfigError, EngineOverloaded, InvalidRequest, clock

from ..security.identity.principal import Principal
from ..settings.batches import BatchesConfig
from .tables import MOST_FILES, Arriving, NewBatch, Place, Result, Tables, Waiting, full, places

_T = TypeVar("_T")
_P = ParamSpec("_P")

ReadRequests = Callable[[bytes, str], tuple[list[tuple[str, bytes]], list[dict[str, Any]]]]
"""From a file and an endpoint to the ids and bodies of requests, and what is wrong with the lines."""


def _on_thread(
    method: Callable[Concatenate[BatchStore, _P], _T],
) -> Callable[Concatenate[BatchStore, _P], Coroutine[Any, Any, _T]]:
    """Runs a method of the store on its thread."""

    @functools.wraps(method)
    async def run(store: BatchStore, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return await store._run(functools.partial(method, store, *args, **named))

    return run


def _as_transaction(
    method: Callable[Concatenate[BatchStore, _P], _T],
) -> Callable[Concatenate[BatchStore, _P], Coroutine[Any, Any, _T]]:
    """As ``_on_thread``, in one transaction. Raises EngineOverloaded if the file can't be written."""

    @functools.wraps(method)
    async def change(store: BatchStore, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return await store._change(functools.partial(method, store, *args, **named))

    return change


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

    @_as_transaction
    def add_file(self, owner: Principal, name: str, content: bytes) -> dict[str, Any]:
        """Raises EngineOverloaded if the caller has too many files or bytes."""
        tables = self._tables
        tables.check_share(owner.name, len(content))
        held = tables.one("SELECT count(*) FROM files WHERE owner = ?", owner.name)[0]
        if held >= MOST_FILES:
            raise full(owner.name, "files", held, MOST_FILES)
        file_id = tables.insert_file(owner.name, "batch", name, len(content), content)
        return tables.owned("files", owner, file_id)

    @_on_thread
    def files(
        self, owner: Principal, after: str, limit: int, purpose: str = ""
    ) -> list[dict[str, Any]]:
        """As of ``Tables.page``."""
        return self._tables.page("files", owner, after, limit, purpose)

    @_on_thread
    def file(self, owner: Principal, file_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next ones."""
        return self._tables.owned("files", owner, file_id)

    @_as_transaction
    def delete_file(self, owner: Principal, file_id: str) -> None:
        file = self._tables.owned("files", owner, file_id)
        self._tables.db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        query = "DELETE FROM requests WHERE batch_id = ? AND succeeded = ?"
        self._tables.db.execute(query, (file["batch_id"], file["succeeded"]))

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

    @_as_transaction
    def add_batch(self, owner: Principal, asked: NewBatch, read: ReadRequests) -> dict[str, Any]:
        """A batch whose file is invalid has failed. Raises StoredNotFound, EngineOverloaded."""
        tables = self._tables
        file = tables.owned("files", owner, asked.input_file_id, "input_file_id")
        if file["batch_id"] is not None:
            raise InvalidRequest("input_file_id", "is an output; upload the requests as a file")
        tables.check_share(owner.name, file["bytes"])
        tables.check_open(owner)
        content: bytes = tables.one("SELECT content FROM files WHERE id = ?", file["id"])[0]
        requests, errors = read(content, asked.endpoint)
        batch = Arriving(owner, bytes=file["bytes"], total=len(requests))
        tables.insert_batch(batch, asked, errors)
        if not errors:
            tables.insert_requests(batch.batch_id, 0, requests)
        return tables.owned("batches", owner, batch.batch_id)

    @_as_transaction
    def add_requests(self, batch: Arriving, requests: Sequence[tuple[str, bytes]]) -> None:
        """The next requests of a batch: their ids and bodies. Raises EngineOverloaded."""
        more = sum(len(body) for _, body in requests)
        self._tables.check_share(batch.owner.name, more)
        self._tables.check_open(batch.owner)
        self._tables.insert_requests(batch.batch_id, batch.total, requests)
        batch.bytes, batch.total = batch.bytes + more, batch.total + len(requests)
        self._tables.arriving[batch.batch_id] = batch

    @_as_transaction
    def start_batch(self, batch: Arriving, asked: NewBatch) -> dict[str, Any]:
        """The batch, whose requests are there. Raises InvalidRequest, EngineOverloaded."""
        query = "SELECT custom_id FROM requests WHERE batch_id = ? GROUP BY 1 HAVING count(*) > 1"
        if (twice := self._tables.one(query, batch.batch_id)) is not None:
            raise InvalidRequest("request.custom_id", f"{twice[0]!r} stands twice")
        self._tables.check_open(batch.owner)
        self._tables.insert_batch(batch, asked, [])
        self._tables.arriving.pop(batch.batch_id, None)
        return self._tables.owned("batches", batch.owner, batch.batch_id)

    async def drop(self, batch: Arriving) -> None:
        """Deletes a batch whose caller does not get its id. Idempotent. No cancellation stops it."""
        await asyncio.shield(self._drop(batch))

    @_as_transaction
    def _drop(self, batch: Arriving) -> None:
        self._tables.arriving.pop(batch.batch_id, None)
        self._tables.delete_batch(batch.batch_id)

    @_on_thread
    def batches(self, owner: Principal, after: str, limit: int) -> list[dict[str, Any]]:
        """As of ``Tables.page``."""
        return self._tables.page("batches", owner, after, limit)

    @_on_thread
    def batch(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next ones."""
        return self._tables.owned("batches", owner, batch_id)

    @_as_transaction
    def cancel(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Ends a batch. Its answers so far are kept."""
        if self._tables.owned("batches", owner, batch_id)["ended_at"] is None:
            self._tables.end(batch_id, "cancelled")
        return self._tables.owned("batches", owner, batch_id)

    @_as_transaction
    def delete_batch(self, owner: Principal, batch_id: str) -> None:
        """Deletes a batch and its results."""
        self._tables.owned("batches", owner, batch_id)
        self._tables.delete_batch(batch_id)

    @_on_thread
    def results(
        self, owner: Principal, batch_id: str, at: int
    ) -> tuple[dict[str, Any], list[Result]]:
        """The batch, and some of its answers from number ``at`` on, up to the first one that is not there yet."""
        batch = self._tables.owned("batches", owner, batch_id)
        return batch, self._tables.results(batch_id, at)

    # Answering

    @_on_thread
    def claim(
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
        tables = self._tables
        query = (
            "SELECT DISTINCT owner FROM batches WHERE ended_at IS NULL "
            f"AND owner NOT IN ({places(paused)})"
        )
        names = [row[0] for row in tables.db.execute(query, (*paused,)).fetchall()]
        lists = [tables.waiting(each, most, endpoints, taken, is_off_peak) for each in names]
        turns = chain.from_iterable(zip_longest(*lists))
        found = [each for each in turns if each is not None][:most]
        query = "SELECT body FROM requests WHERE batch_id = ? AND number = ?"
        return [each._replace(body=tables.one(query, *each.place)[0]) for each in found]

    @_as_transaction
    def answer(self, request: Waiting, line: bytes, succeeded: bool) -> None:
        """Stores the answer to a request, unless its batch has ended. The last one ends the batch."""
        tables, batch_id = self._tables, request.batch_id
        query = (
            "UPDATE requests SET line = ?, succeeded = ?, body = NULL "
            "WHERE batch_id = ? AND number = ? AND line IS NULL"
        )
        if not tables.db.execute(query, (line, succeeded, *request.place)).rowcount:
            return
        counter = "completed" if succeeded else "failed"
        query = f"UPDATE batches SET {counter} = {counter} + 1, bytes = bytes + ? WHERE id = ?"
        tables.db.execute(query, (len(line), batch_id))
        query = "SELECT total - completed - failed FROM batches WHERE id = ?"
        if tables.one(query, batch_id)[0] == 0:
            tables.end(batch_id, "completed")
        else:
            tables.end_if_full(request)

    @_as_transaction
    def expire(self) -> None:
        """Ends the batches whose time is over, and deletes what is kept no longer."""
        db, now = self._tables.db, int(clock.wall())
        late = "SELECT id FROM batches WHERE ended_at IS NULL AND expires_at <= ?"
        for (batch_id,) in db.execute(late, (now,)).fetchall():
            self._tables.end(batch_id, "expired")
        old = "SELECT id FROM batches WHERE ended_at IS NOT NULL AND kept_until <= ?"
        for (batch_id,) in db.execute(old, (now,)).fetchall():
            self._tables.delete_batch(batch_id)
        db.execute("DELETE FROM files WHERE expires_at <= ?", (now,))
