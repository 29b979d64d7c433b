"""BatchStore: the files and batches of callers, in one SQLite file. Owns what is stored, and the state of each request.

A request is answered once its line is stored, and its line is stored once. What was being answered when the process
ended is answered again after the next start. A thread of its own runs all statements, one transaction after the other.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar

from kestrel_engine import ConfigError, EngineOverloaded, InvalidRequest, Quota, clock

from ..edge.failures.errors import StoredNotFound
from ..security.identity.principal import Principal, Scope
from ..settings.batches import BatchesConfig
from .database import open_database

MOST_OPEN, MOST_FILES = 16, 1000
"""Of a caller's batches that have not ended; of a caller's files."""
MOST_REQUESTS, LONGEST_ID = 50_000, 512
"""Of a batch's requests; of the characters of a request's name."""
WINDOW_S = 24 * 3600
"""A batch that has not ended by then expires."""
_SHARE = 4
_BATCH_BYTES = 16 * 1024
"""What each batch counts at least, so that a caller has at most some 65,000 of them, however small."""
_PAGE_BYTES = 64 * 1024
"""What a reader of a file holds at one time, beside the last line."""
_DAY_S = 86_400.0
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_LIMITS = ("weight", "minute_tokens", "day_tokens")
_COLUMNS = {"files": "rowid, id, bytes, batch_id, succeeded", "batches": "id, ended_at"}
_T = TypeVar("_T")


class Waiting(NamedTuple):
    """A request that waits for its answer."""

    batch_id: str
    number: int
    custom_id: str
    body: bytes
    endpoint: str
    owner: Principal
    """As when the batch was made, with the scope infer alone."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a caller asks for."""

    endpoint: str
    input_file_id: str = ""
    completion_window: str = "24h"
    metadata: dict[str, str] = field(default_factory=dict)
    off_peak: bool = False
    """As of ``claim``."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A batch whose requests arrive. ``drop`` or ``start_batch`` ends it."""

    owner: Principal
    batch_id: str = field(default_factory=lambda: f"batch_{uuid.uuid4().hex}")
    bytes: int = 0
    total: int = 0


class Result(NamedTuple):
    """The answer to a request: its place, its caller's name for it, and its line."""

    number: int
    custom_id: str
    line: bytes


ReadRequests = Callable[[bytes, str], tuple[list[tuple[str, bytes]], list[dict[str, Any]]]]
"""From a file and an endpoint to the ids and bodies of requests, and what is wrong with the lines."""


class StoreUnwritable(EngineOverloaded, sqlite3.Error):
    """The file can't be written: the disk may be full."""


class BatchStore:
    """Raises ConfigError if the file cannot be used, or another process uses it."""

    def __init__(self, config: BatchesConfig) -> None:
        assert config.path is not None, "the settings name a file"
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-batches")
        try:
            self._db = self._thread.submit(open_database, config.path).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError("batches", config.path, f"cannot be used: {error}") from None
        self._claimed: set[tuple[str, int]] = set()
        """The requests that are being answered. Used by the thread alone, as the next."""
        self._arriving: dict[str, Arriving] = {}
        self.changed = asyncio.Event()
        """Set at the next change, when another takes its place."""
        self.is_left = False
        """Whether nobody answers requests any more."""

    def leave(self) -> None:
        """Nobody answers requests any more."""
        self.is_left = True
        self.changed.set()

    async def close(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _change(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` as one transaction. Raises StoreUnwritable."""

        def change() -> _T:
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    return work()
            except sqlite3.OperationalError as error:
                why = f"files and batches can't be stored: {error}; try again later"
                raise StoreUnwritable(why, retry_after_s=60) from None

        changed = await self._run(change)
        self.changed.set()
        if not self.is_left:
            self.changed = asyncio.Event()
        return changed

    # Files

    async def add_file(self, owner: Principal, name: str, content: bytes) -> dict[str, Any]:
        """Raises EngineOverloaded if the caller has too many files or bytes."""

        def add() -> dict[str, Any]:
            self._check_share(owner.name, len(content))
            held = self._one("SELECT count(*) FROM files WHERE owner = ?", owner.name)[0]
            if held >= MOST_FILES:
                raise _full(owner.name, "files", held, MOST_FILES)
            return self._file(self._insert_file(owner.name, "batch", name, len(content), content))

        return await self._change(add)

    async def files(self, owner: Principal) -> list[dict[str, Any]]:
        """Newest first."""
        query = "SELECT id FROM files WHERE owner = ? ORDER BY created_at DESC, id"
        return await self._run(
            lambda: [self._file(row[0]) for row in self._db.execute(query, (owner.name,))]
        )

    async def file(self, owner: Principal, file_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next ones."""
        return await self._run(lambda: self._file(self._owned("files", owner, file_id)["id"]))

    async def delete_file(self, owner: Principal, file_id: str) -> None:
        def delete() -> None:
            file = self._owned("files", owner, file_id)
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if file["batch_id"] is not None:
                self._db.execute(
                    "DELETE FROM requests WHERE batch_id = ? AND succeeded = ?",
                    (file["batch_id"], file["succeeded"]),
                )

        await self._change(delete)

    async def content(self, owner: Principal, file_id: str) -> AsyncIterator[bytes]:
        """The content of a file, in pieces."""
        at = 0
        while True:
            read = functools.partial(self._piece, owner, file_id, at)
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
            file = self._owned("files", owner, asked.input_file_id, "input_file_id")
            if file["batch_id"] is not None:
                raise InvalidRequest("input_file_id", "is an output; upload the requests as a file")
            self._check_share(owner.name, file["bytes"])
            self._check_open(owner)
            query = "SELECT content FROM files WHERE id = ?"
            content: bytes = self._one(query, file["id"])[0]
            requests, errors = read(content, asked.endpoint)
            batch = Arriving(owner, bytes=file["bytes"], total=len(requests))
            self._insert_batch(batch, asked, errors)
            if not errors:
                self._insert_requests(batch.batch_id, 0, requests)
            return self._batch(batch.batch_id)

        return await self._change(add)

    async def add_requests(self, batch: Arriving, requests: Sequence[tuple[str, bytes]]) -> None:
        """The next requests of a batch: their ids and bodies. Raises EngineOverloaded."""

        def add() -> None:
            more = sum(len(body) for _, body in requests)
            self._check_share(batch.owner.name, more)
            self._check_open(batch.owner)
            self._insert_requests(batch.batch_id, batch.total, requests)
            batch.bytes, batch.total = batch.bytes + more, batch.total + len(requests)
            self._arriving[batch.batch_id] = batch

        await self._change(add)

    async def start_batch(self, batch: Arriving, asked: NewBatch) -> dict[str, Any]:
        """The batch, whose requests are there. Raises InvalidRequest, EngineOverloaded."""

        def start() -> dict[str, Any]:
            query = (
                "SELECT custom_id FROM requests WHERE batch_id = ? GROUP BY 1 HAVING count(*) > 1"
            )
            if (twice := self._one(query, batch.batch_id)) is not None:
                raise InvalidRequest("request.custom_id", f"{twice[0]!r} stands twice")
            self._check_open(batch.owner)
            self._insert_batch(batch, asked, [])
            self._arriving.pop(batch.batch_id, None)
            return self._batch(batch.batch_id)

        return await self._change(start)

    async def drop(self, batch: Arriving) -> None:
        """Deletes the requests of a batch that was not started. Idempotent."""

        def drop() -> None:
            self._arriving.pop(batch.batch_id, None)
            self._db.execute(
                "DELETE FROM requests WHERE batch_id = ?1 AND NOT EXISTS (SELECT 1 FROM batches WHERE id = ?1)",
                (batch.batch_id,),
            )

        await self._change(drop)

    async def batches(self, owner: Principal, after: str, limit: int) -> list[dict[str, Any]]:
        """Newest first. ``after``: the id of the last batch that the caller knows; "" for the first ones."""

        def found() -> list[dict[str, Any]]:
            ids = "SELECT id FROM batches WHERE owner = ? ORDER BY created_at DESC, id"
            known = [row[0] for row in self._db.execute(ids, (owner.name,))]
            if after and after not in known:
                raise StoredNotFound("after", f"you have no batch {after[:100]!r}")
            begin = known.index(after) + 1 if after else 0
            return [self._batch(each) for each in known[begin : begin + limit]]

        return await self._run(found)

    async def batch(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Raises StoredNotFound, as the next one."""
        return await self._run(lambda: self._batch(self._owned("batches", owner, batch_id)["id"]))

    async def cancel(self, owner: Principal, batch_id: str) -> dict[str, Any]:
        """Ends a batch. Its answers so far are kept."""

        def cancel() -> dict[str, Any]:
            if self._owned("batches", owner, batch_id)["ended_at"] is None:
                self._end(batch_id, "cancelled")
            return self._batch(batch_id)

        return await self._change(cancel)

    async def delete_batch(self, owner: Principal, batch_id: str) -> None:
        """Deletes a batch and its results. Raises StoredNotFound."""

        def delete() -> None:
            self._owned("batches", owner, batch_id)
            self._delete_batch(batch_id)

        await self._change(delete)

    async def results(
        self, owner: Principal, batch_id: str, at: int
    ) -> tuple[dict[str, Any], list[Result]]:
        """The batch, and some of its answers from number ``at`` on, up to the first one that is not there yet. Raises
        StoredNotFound."""

        def results() -> tuple[dict[str, Any], list[Result]]:
            batch = self._batch(self._owned("batches", owner, batch_id)["id"])
            found: list[Result] = []
            query = (
                "SELECT number, custom_id, line FROM requests WHERE batch_id = ? AND number >= ? "
                "ORDER BY number"
            )
            num_bytes = 0
            for row in self._db.execute(query, (batch_id, at)):
                if row["line"] is None or num_bytes > _PAGE_BYTES:
                    break
                found.append(Result(*row))
                num_bytes += len(row["line"])
            return batch, found

        return await self._run(results)

    # Answering

    async def claim(
        self,
        most: int,
        endpoints: Collection[str],
        paused: Collection[str] = (),
        *,
        is_off_peak: bool = True,
    ) -> list[Waiting]:
        """Up to ``most`` requests to ``endpoints`` to answer next, callers in turn, the oldest batch of each first.
        ``paused``: callers without a turn. ``is_off_peak``: also of batches that wait for that."""
        if most <= 0:
            return []
        owners = (
            "SELECT DISTINCT owner FROM batches WHERE ended_at IS NULL "
            f"AND owner NOT IN ({_places(paused)})"
        )

        def claim() -> list[Waiting]:
            names = [row[0] for row in self._db.execute(owners, (*paused,)).fetchall()]
            lists = [self._waiting(name, most, endpoints, is_off_peak) for name in names]
            turns = chain.from_iterable(zip_longest(*lists))
            found = [each for each in turns if each is not None][:most]
            self._claimed.update(each[:2] for each in found)
            return found

        return await self._run(claim)

    async def answer(self, request: Waiting, line: bytes, succeeded: bool) -> None:
        """Stores the answer to a request, unless its batch has ended. The last one ends the batch."""

        def answer() -> None:
            key = request[:2]
            stored = self._db.execute(
                "UPDATE requests SET line = ?, succeeded = ?, body = NULL "
                "WHERE batch_id = ? AND number = ? AND line IS NULL",
                (line, succeeded, *key),
            )
            if not stored.rowcount:
                return
            counter = "completed" if succeeded else "failed"
            query = f"UPDATE batches SET {counter} = {counter} + 1, bytes = bytes + ? WHERE id = ?"
            self._db.execute(query, (len(line), key[0]))
            query = "SELECT total - completed - failed FROM batches WHERE id = ?"
            if self._one(query, key[0])[0] == 0:
                self._end(key[0], "completed")
            else:
                self._end_if_full(request)

        await self._change(answer)

    async def give_back(self, request: Waiting) -> None:
        """Another ``claim`` may have the request."""
        await self._run(lambda: self._claimed.discard(request[:2]))

    async def expire(self) -> None:
        """Ends the batches whose time is over, and deletes what is kept no longer."""

        def expire() -> None:
            now = int(clock.wall())
            late = "SELECT id FROM batches WHERE ended_at IS NULL AND expires_at <= ?"
            for (batch_id,) in self._db.execute(late, (now,)).fetchall():
                self._end(batch_id, "expired")
            old = "SELECT id FROM batches WHERE ended_at IS NOT NULL AND kept_until <= ?"
            for (batch_id,) in self._db.execute(old, (now,)).fetchall():
                self._delete_batch(batch_id)
            self._db.execute("DELETE FROM files WHERE expires_at <= ?", (now,))

        await self._change(expire)

    # On the thread

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()

    def _owned(self, table: str, owner: Principal, name: str, field: str = "id") -> sqlite3.Row:
        """The row of a caller's file or batch, which ``field`` names. Raises StoredNotFound."""
        names = _COLUMNS[table]
        query = f"SELECT {names} FROM {table} WHERE id = ? AND owner = ?"
        row: sqlite3.Row | None = None
        if _ID.fullmatch(name):
            row = self._one(query, name, owner.name)
        if row is None:
            raise StoredNotFound(
                field, f"you have no {'file' if table == 'files' else 'batch'} {name[:100]!r}"
            )
        return row

    def _check_open(self, owner: Principal) -> None:
        """Raises EngineOverloaded if the caller has too many batches that have not ended."""
        query = "SELECT count(*) FROM batches WHERE owner = ? AND ended_at IS NULL"
        open_ = self._one(query, owner.name)[0]
        if open_ >= MOST_OPEN:
            raise _full(owner.name, "open batches", open_, MOST_OPEN)

    def _insert_batch(self, batch: Arriving, asked: NewBatch, errors: list[dict[str, Any]]) -> None:
        now, owner = int(clock.wall()), batch.owner
        self._db.execute(
            "INSERT INTO batches VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,0,0,NULL,NULL,?)",
            (
                *(batch.batch_id, owner.name, _caller(owner)),
                "failed" if errors else "in_progress",
                *(asked.endpoint, asked.input_file_id, asked.completion_window),
                *(json.dumps(asked.metadata), json.dumps(errors) if errors else None),
                *(now, now if errors else None, now + WINDOW_S, self._kept_until(now)),
                *((0, 0) if errors else (batch.bytes, batch.total)),
                asked.off_peak,
            ),
        )

    def _insert_requests(
        self, batch_id: str, first: int, requests: Sequence[tuple[str, bytes]]
    ) -> None:
        self._db.executemany(
            "INSERT INTO requests VALUES (?, ?, ?, ?, NULL, NULL)",
            ((batch_id, number, *each) for number, each in enumerate(requests, first)),
        )

    def _delete_batch(self, batch_id: str) -> None:
        self._db.execute("DELETE FROM requests WHERE batch_id = ?", (batch_id,))
        self._db.execute("DELETE FROM files WHERE batch_id = ?", (batch_id,))
        self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def _kept_until(self, now: float) -> int:
        return int(now + self._config.days * _DAY_S)

    def _check_share(self, owner: str, more: int) -> None:
        """Raises EngineOverloaded if ``more`` bytes exceed the caller's share, or the store."""
        size = f"bytes + {_BATCH_BYTES} + length(metadata) + length(coalesce(errors, ''))"
        query = (
            "SELECT (SELECT total(bytes) FROM files {0}) + "
            f"(SELECT total({size}) FROM batches {{0}})"
        )
        arriving = self._arriving.values()
        own = self._one(query.format("WHERE owner = ?1"), owner)[0]
        own += sum(each.bytes for each in arriving if each.owner.name == owner)
        most = self._config.max_bytes
        if own + more > most // _SHARE:
            raise _full(owner, "bytes of files and batches", int(own) + more, most // _SHARE)
        if self._one(query.format(""))[0] + sum(each.bytes for each in arriving) + more > most:
            raise EngineOverloaded(
                "the store of batches is full; try again later", retry_after_s=60
            )

    def _end_if_full(self, request: Waiting) -> None:
        """Ends a batch whose answers exceed the caller's share, or the store: answers may be far longer than the
        requests."""
        try:
            self._check_share(request.owner.name, 0)
        except EngineOverloaded as full:
            error = {"code": "store_full", "line": None, "message": str(full), "param": None}
            self._end(request.batch_id, "failed")
            query = "UPDATE batches SET errors = ? WHERE id = ?"
            self._db.execute(query, (json.dumps([error]), request.batch_id))

    def _insert_file(
        self, owner: str, purpose: str, name: str, num_bytes: int, *content: Any
    ) -> str:
        now, file_id = int(clock.wall()), f"file-{uuid.uuid4().hex}"
        content = content if len(content) == 3 else (*content, None, None)
        values = (file_id, owner, purpose, name, num_bytes, now, self._kept_until(now), *content)
        self._db.execute("INSERT INTO files VALUES (?,?,?,?,?,?,?,?,?,?)", values)
        return file_id

    def _file(self, file_id: str) -> dict[str, Any]:
        names = "id, bytes, created_at, expires_at, filename, purpose"
        return dict(self._one(f"SELECT {names} FROM files WHERE id = ?", file_id))

    def _batch(self, batch_id: str) -> dict[str, Any]:
        return dict(self._one("SELECT * FROM batches WHERE id = ?", batch_id))

    def _piece(self, owner: Principal, file_id: str, at: int) -> tuple[bytes, int]:
        """A piece of a file's content, and where the next one begins."""
        file = self._owned("files", owner, file_id)
        if file["batch_id"] is None:
            with self._db.blobopen("files", "content", file["rowid"], readonly=True) as content:
                content.seek(min(at, file["bytes"]))
                return content.read(_PAGE_BYTES), at + _PAGE_BYTES
        rows = self._db.execute(
            "SELECT number, line FROM requests WHERE batch_id = ? AND succeeded = ? AND number >= ? "
            "ORDER BY number",
            (file["batch_id"], file["succeeded"], at),
        )
        piece = bytearray()
        for number, line in rows:
            piece += line + b"\n"
            at = number + 1
            if len(piece) >= _PAGE_BYTES:
                break
        return bytes(piece), at

    def _waiting(
        self, owner: str, most: int, endpoints: Collection[str], is_off_peak: bool
    ) -> list[Waiting]:
        """Up to ``most`` requests of a caller that nobody answers yet."""
        found: list[Waiting] = []
        batches = self._db.execute(
            "SELECT id, endpoint, caller FROM batches WHERE owner = ? AND ended_at IS NULL "
            f"AND off_peak <= ? AND endpoint IN ({_places(endpoints)}) ORDER BY created_at, id",
            (owner, is_off_peak, *endpoints),
        ).fetchall()
        for batch in batches:
            caller = Principal(owner, frozenset({Scope.INFER}), **json.loads(batch["caller"]))
            rows = self._db.execute(
                "SELECT number, custom_id, body FROM requests "
                "WHERE batch_id = ? AND line IS NULL ORDER BY number LIMIT ?",
                (batch["id"], most + len(self._claimed)),
            )
            for row in rows:
                if len(found) < most and (batch["id"], row["number"]) not in self._claimed:
                    number, name, body = row
                    found.append(
                        Waiting(batch["id"], number, name, body, batch["endpoint"], caller)
                    )
            if len(found) == most:
                break
        return found

    def _end(self, batch_id: str, status: str) -> None:
        """Ends a batch: what has no answer yet fails, and the answers become files."""
        line = {
            "id": None,
            "custom_id": None,
            "response": None,
            "error": {"code": f"batch_{status}", "message": f"the batch was {status} before"},
        }
        self._db.execute(
            "UPDATE requests SET succeeded = 0, body = NULL, line = CAST(json_set(?, "
            "'$.custom_id', custom_id, '$.id', batch_id || '_' || number) AS BLOB) "
            "WHERE batch_id = ? AND line IS NULL",
            (json.dumps(line), batch_id),
        )
        owner = self._one("SELECT owner FROM batches WHERE id = ?", batch_id)[0]
        files: list[str | None] = []
        for succeeded, name in ((1, "output"), (0, "errors")):
            query = (
                "SELECT total(length(line) + 1) FROM requests WHERE batch_id = ? AND succeeded = ?"
            )
            num_bytes = int(self._one(query, batch_id, succeeded)[0])
            made = (owner, "batch_output", f"{batch_id}_{name}.jsonl", num_bytes, None)
            files.append(self._insert_file(*made, batch_id, succeeded) if num_bytes else None)
        self._db.execute(
            "UPDATE batches SET status = ?, ended_at = ?, bytes = 0, failed = total - completed, output_file_id = ?, "
            "error_file_id = ? WHERE id = ?",
            (status, int(clock.wall()), *files, batch_id),
        )


def _caller(owner: Principal) -> str:
    """What limits a caller, beside its name, as JSON."""
    return json.dumps({name: getattr(owner, name) for name in _LIMITS})


def _places(values: Collection[str]) -> str:
    return ",".join("?" * len(values))


def _full(owner: str, what: str, held: int, share: int) -> EngineOverloaded:
    quota = Quota(owner, what, held, share)
    return EngineOverloaded(
        f"{held} {what}; the limit is {share}; delete files or wait", retry_after_s=60, quota=quota
    )
