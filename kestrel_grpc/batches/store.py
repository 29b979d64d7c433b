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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar

from kestrel_engine import ConfigError, EngineOverloaded, InvalidRequest, Quota, clock

from ..edge.failures.errors import StoredNotFound
from ..security.identity.principal import Principal, Scope
from ..settings.batches import BatchesConfig
from .database import open_database
from .requests import read_requests

MOST_OPEN, MOST_FILES = 16, 1000
"""Of a caller's batches that have not ended; of a caller's files."""
WINDOW_S = 24 * 3600
"""A batch that has not ended by then expires."""
_SHARE = 4
_PAGE_BYTES = 256 * 1024
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
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]


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
        """The requests that are being answered. Used by the thread alone."""

    async def close(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _change(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` as one transaction."""

        def change() -> _T:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                return work()

        return await self._run(change)

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

    async def add_batch(self, owner: Principal, asked: NewBatch) -> dict[str, Any]:
        """A batch whose file is invalid has failed. Raises StoredNotFound, EngineOverloaded."""

        def add() -> dict[str, Any]:
            file = self._owned("files", owner, asked.input_file_id, "input_file_id")
            if file["batch_id"] is not None:
                raise InvalidRequest("input_file_id", "is an output; upload the requests as a file")
            self._check_share(owner.name, file["bytes"])
            query = "SELECT count(*) FROM batches WHERE owner = ? AND ended_at IS NULL"
            open_ = self._one(query, owner.name)[0]
            if open_ >= MOST_OPEN:
                raise _full(owner.name, "open batches", open_, MOST_OPEN)
            query = "SELECT content FROM files WHERE id = ?"
            content: bytes = self._one(query, file["id"])[0]
            requests, errors = read_requests(content, asked.endpoint)
            now, batch_id = int(clock.wall()), f"batch_{uuid.uuid4().hex}"
            self._db.execute(
                "INSERT INTO batches VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,0,0,NULL,NULL)",
                (
                    *(batch_id, owner.name, _caller(owner), "failed" if errors else "in_progress"),
                    *(asked.endpoint, asked.input_file_id, asked.completion_window),
                    *(json.dumps(asked.metadata), json.dumps(errors) if errors else None),
                    *(now, now if errors else None, now + WINDOW_S, self._kept_until(now)),
                    *((0, 0) if errors else (file["bytes"], len(requests))),
                ),
            )
            if not errors:
                self._db.executemany(
                    "INSERT INTO requests VALUES (?, ?, ?, ?, NULL, NULL)",
                    ((batch_id, number, *each) for number, each in enumerate(requests)),
                )
            return self._batch(batch_id)

        return await self._change(add)

    async def batches(self, owner: Principal, after: str, limit: int) -> list[dict[str, Any]]:
        """Newest first. ``after``: the id of the last batch that the caller knows; "" for the first ones."""

        def found() -> list[dict[str, Any]]:
            ids = "SELECT id FROM batches WHERE owner = ? ORDER BY created_at DESC, id"
            known = [row[0] for row in self._db.execute(ids, (owner.name,))]
            begin = known.index(after) + 1 if after in known else 0
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

    # Answering

    async def claim(self, most: int) -> list[Waiting]:
        """Up to ``most`` requests to answer next, callers in turn, the oldest batch of each first."""

        def claim() -> list[Waiting]:
            owners = "SELECT DISTINCT owner FROM batches WHERE ended_at IS NULL"
            lists = [self._waiting(row[0], most) for row in self._db.execute(owners).fetchall()]
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
            self._db.execute(f"UPDATE batches SET {counter} = {counter} + 1 WHERE id = ?", key[:1])
            query = "SELECT total - completed - failed FROM batches WHERE id = ?"
            if self._one(query, key[0])[0] == 0:
                self._end(key[0], "completed")

        await self._change(answer)
        await self.give_back(request)

    async def give_back(self, request: Waiting) -> None:
        """Another ``claim`` may have the request."""
        await self._run(lambda: self._claimed.discard(request[:2]))

    async def is_open(self, batch_id: str) -> bool:
        query = "SELECT 1 FROM batches WHERE id = ? AND ended_at IS NULL"
        return await self._run(lambda: self._one(query, batch_id) is not None)

    async def expire(self) -> None:
        """Ends the batches whose time is over, and deletes what is kept no longer."""

        def expire() -> None:
            now = int(clock.wall())
            late = "SELECT id FROM batches WHERE ended_at IS NULL AND expires_at <= ?"
            for (batch_id,) in self._db.execute(late, (now,)).fetchall():
                self._end(batch_id, "expired")
            old = "SELECT id FROM batches WHERE ended_at IS NOT NULL AND kept_until <= ?"
            for (batch_id,) in self._db.execute(old, (now,)).fetchall():
                self._db.execute("DELETE FROM requests WHERE batch_id = ?", (batch_id,))
                self._db.execute("DELETE FROM files WHERE batch_id = ?", (batch_id,))
                self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
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

    def _kept_until(self, now: float) -> int:
        return int(now + self._config.days * _DAY_S)

    def _check_share(self, owner: str, more: int) -> None:
        """Raises EngineOverloaded if ``more`` bytes exceed the caller's share, or the store."""
        query = (
            "SELECT (SELECT total(bytes) FROM files {0}) + (SELECT total(bytes) FROM batches {0})"
        )
        own = self._one(query.format("WHERE owner = ?1"), owner)[0]
        most = self._config.max_bytes
        if own + more > most // _SHARE:
            raise _full(owner, "bytes of files and batches", int(own) + more, most // _SHARE)
        if self._one(query.format(""))[0] + more > most:
            raise EngineOverloaded(
                "the store of batches is full; try again later", retry_after_s=60
            )

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
            "ORDER BY number LIMIT 100",
            (file["batch_id"], file["succeeded"], at),
        ).fetchall()
        return b"".join(row["line"] + b"\n" for row in rows), rows[-1]["number"] + 1 if rows else at

    def _waiting(self, owner: str, most: int) -> list[Waiting]:
        """Up to ``most`` requests of a caller that nobody answers yet."""
        found: list[Waiting] = []
        batches = self._db.execute(
            "SELECT id, endpoint, caller FROM batches WHERE owner = ? AND ended_at IS NULL "
            "ORDER BY created_at, id",
            (owner,),
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


def _full(owner: str, what: str, held: int, share: int) -> EngineOverloaded:
    quota = Quota(owner, what, held, share)
    return EngineOverloaded(
        f"{held} {what}; the limit is {share}; delete files or wait", retry_after_s=60, quota=quota
    )
