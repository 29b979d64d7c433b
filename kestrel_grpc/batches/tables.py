"""Tables: the rows of files and batches, and what callers may have of them. Runs on the store's thread, in transactions
that the store begins."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kestrel_engine import EngineOverloaded, Quota, clock

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
_PAGE_BYTES = 64 * 1024
"""What a reader of results holds at one time, beside the last line."""
_PIECE_BYTES = 1024 * 1024
"""What a reader of a file that was sent holds. SQLite walks to each piece from the file's beginning."""
_DAY_S = 86_400.0
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_LIMITS = ("weight", "minute_tokens", "day_tokens")
_COLUMNS = {
    "files": "rowid, id, bytes, created_at, expires_at, filename, purpose, batch_id, succeeded",
    "batches": "*",
}
"""Without the content of a file."""


Place = tuple[str, int]
"""Of a request: its batch, and its number there."""


class Waiting(NamedTuple):
    """A request that waits for its answer."""

    batch_id: str
    number: int
    custom_id: str
    body: bytes
    endpoint: str
    owner: Principal
    """As when the batch was made, with the scope infer alone."""

    @property
    def place(self) -> Place:
        return self.batch_id, self.number


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


class Tables:
    """Raises OSError and sqlite3.Error if the file cannot be used."""

    def __init__(self, config: BatchesConfig) -> None:
        assert config.path is not None, "the settings name a file"
        self._config = config
        self.db = open_database(config.path)
        self.ended: list[str] = []
        """Batches that have ended, or are deleted, since the store has last seen them."""
        self.arriving: dict[str, Arriving] = {}

    def one(self, query: str, *values: Any) -> Any:
        return self.db.execute(query, values).fetchone()

    def owned(self, table: str, owner: Principal, name: str, field: str = "id") -> dict[str, Any]:
        """The row of a caller's file or batch, which ``field`` names. Raises StoredNotFound."""
        query = f"SELECT {_COLUMNS[table]} FROM {table} WHERE id = ? AND owner = ?"
        row = self.one(query, name, owner.name) if _ID.fullmatch(name) else None
        if row is None:
            kind = "file" if table == "files" else "batch"
            raise StoredNotFound(field, f"you have no {kind} {name[:100]!r}")
        return dict(row)

    def page(
        self, table: str, owner: Principal, after: str, limit: int, purpose: str = ""
    ) -> list[dict[str, Any]]:
        """The rows of a caller's files or batches, the newest first. ``after``: the id of the last one that the caller
        knows; "" for the first page. ``purpose``: of the files; "" for all. Raises StoredNotFound."""
        rest, known = "", list[Any]()
        if purpose:
            rest, known = "AND purpose = ? ", [purpose]
        if after:
            rest += "AND created_at <= ? AND (created_at < ? OR id > ?)"
            last = self.owned(table, owner, after, "after")["created_at"]
            known += [last, last, after]
        query = (
            f"SELECT {_COLUMNS[table]} FROM {table} WHERE owner = ? {rest} "
            "ORDER BY created_at DESC, id LIMIT ?"
        )
        return [dict(row) for row in self.db.execute(query, (owner.name, *known, limit))]

    def check_open(self, owner: Principal) -> None:
        """Raises EngineOverloaded if the caller has too many batches that have not ended."""
        query = "SELECT count(*) FROM batches WHERE owner = ? AND ended_at IS NULL"
        open_ = self.one(query, owner.name)[0]
        if open_ >= MOST_OPEN:
            raise full(owner.name, "open batches", open_, MOST_OPEN)

    def insert_batch(self, batch: Arriving, asked: NewBatch, errors: list[dict[str, Any]]) -> None:
        now, owner = int(clock.wall()), batch.owner
        self.db.execute(
            "INSERT INTO batches VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,0,0,NULL,NULL,?)",
            (
                *(batch.batch_id, owner.name, _caller(owner)),
                "failed" if errors else "in_progress",
                *(asked.endpoint, asked.input_file_id, asked.completion_window),
                *(json.dumps(asked.metadata), json.dumps(errors) if errors else None),
                *(now, now if errors else None, now + WINDOW_S, self.kept_until(now)),
                *((0, 0) if errors else (batch.bytes, batch.total)),
                asked.off_peak,
            ),
        )

    def insert_requests(
        self, batch_id: str, first: int, requests: Sequence[tuple[str, bytes]]
    ) -> None:
        self.db.executemany(
            "INSERT INTO requests VALUES (?, ?, ?, ?, NULL, NULL)",
            ((batch_id, number, *each) for number, each in enumerate(requests, first)),
        )

    def delete_batch(self, batch_id: str) -> None:
        self.ended.append(batch_id)
        self.db.execute("DELETE FROM requests WHERE batch_id = ?", (batch_id,))
        self.db.execute("DELETE FROM files WHERE batch_id = ?", (batch_id,))
        self.db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def kept_until(self, now: float) -> int:
        return int(now + self._config.days * _DAY_S)

    def check_share(self, owner: str, more: int) -> None:
        """Raises EngineOverloaded if ``more`` bytes exceed the caller's share, or the store."""
        arriving = self.arriving.values()
        own = self.one("SELECT total(bytes) FROM held WHERE owner = ?", owner)[0]
        own += sum(each.bytes for each in arriving if each.owner.name == owner)
        most = self._config.max_bytes
        if own + more > most // _SHARE:
            raise full(owner, "bytes of files and batches", int(own) + more, most // _SHARE)
        held = self.one("SELECT total(bytes) FROM held")[0]
        if held + sum(each.bytes for each in arriving) + more > most:
            raise EngineOverloaded(
                "the store of batches is full; try again later", retry_after_s=60
            )

    def end_if_full(self, request: Waiting) -> None:
        """Ends a batch whose answers exceed the caller's share, or the store: answers may be longer than requests."""
        try:
            self.check_share(request.owner.name, 0)
        except EngineOverloaded as full:
            self.end(request.batch_id, "failed")
            query = "UPDATE batches SET errors = ? WHERE id = ?"
            errors = json.dumps([fault("store_full", str(full))])
            self.db.execute(query, (errors, request.batch_id))

    def insert_file(
        self, owner: str, purpose: str, name: str, num_bytes: int, *content: Any
    ) -> str:
        now, file_id = int(clock.wall()), f"file-{uuid.uuid4().hex}"
        content = content if len(content) == 3 else (*content, None, None)
        values = (file_id, owner, purpose, name, num_bytes, now, self.kept_until(now), *content)
        self.db.execute("INSERT INTO files VALUES (?,?,?,?,?,?,?,?,?,?)", values)
        return file_id

    def piece(self, owner: Principal, file_id: str, at: int) -> tuple[bytes, int]:
        """A piece of a file's content, and where the next one begins."""
        file = self.owned("files", owner, file_id)
        if file["batch_id"] is None:
            with self.db.blobopen("files", "content", file["rowid"], readonly=True) as content:
                content.seek(min(at, file["bytes"]))
                return content.read(_PIECE_BYTES), at + _PIECE_BYTES
        rows = self.results(file["batch_id"], at, (file["succeeded"],))
        lines = b"".join(each.line + b"\n" for each in rows)
        return lines, rows[-1].number + 1 if rows else at

    def results(self, batch_id: str, at: int, kinds: Sequence[int] = (0, 1)) -> list[Result]:
        """Some answers from number ``at`` on, up to the first one that is not there yet. ``kinds``: 0 of failed
        requests, 1 of others."""
        query = (
            "SELECT number, custom_id, line FROM requests WHERE batch_id = ? AND number >= ? "
            f"AND (line IS NULL OR succeeded IN ({places(kinds)})) ORDER BY number"
        )
        found: list[Result] = []
        num_bytes = 0
        for row in self.db.execute(query, (batch_id, at, *kinds)):
            if row["line"] is None or num_bytes > _PAGE_BYTES:
                break
            found.append(Result(*row))
            num_bytes += len(row["line"])
        return found

    def waiting(
        self,
        owner: str,
        most: int,
        endpoints: Collection[str],
        taken: Collection[Place],
        is_off_peak: bool,
    ) -> list[Waiting]:
        """Up to ``most`` requests of a caller beside those that are ``taken``, without their bodies."""
        found: list[Waiting] = []
        batches = self.db.execute(
            "SELECT id, endpoint, caller FROM batches WHERE owner = ? AND ended_at IS NULL "
            f"AND off_peak <= ? AND endpoint IN ({places(endpoints)}) ORDER BY created_at, id",
            (owner, is_off_peak, *endpoints),
        ).fetchall()
        for batch in batches:
            caller = Principal(owner, frozenset({Scope.INFER}), **json.loads(batch["caller"]))
            rows = self.db.execute(
                "SELECT number, custom_id FROM requests "
                "WHERE batch_id = ? AND line IS NULL ORDER BY number LIMIT ?",
                (batch["id"], most + len(taken)),
            )
            for row in rows:
                if len(found) < most and (batch["id"], row["number"]) not in taken:
                    number, name = row
                    found.append(Waiting(batch["id"], number, name, b"", batch["endpoint"], caller))
            if len(found) == most:
                break
        return found

    def end(self, batch_id: str, status: str) -> None:
        """Ends a batch: what has no answer yet fails, and the answers become files."""
        self.ended.append(batch_id)
        line = {
            "id": None,
            "custom_id": None,
            "response": None,
            "error": {"code": f"batch_{status}", "message": f"the batch was {status} before"},
        }
        self.db.execute(
            "UPDATE requests SET succeeded = 0, body = NULL, line = CAST(json_set(?, "
            "'$.custom_id', custom_id, '$.id', batch_id || '_' || number) AS BLOB) "
            "WHERE batch_id = ? AND line IS NULL",
            (json.dumps(line), batch_id),
        )
        owner = self.one("SELECT owner FROM batches WHERE id = ?", batch_id)[0]
        files: list[str | None] = []
        for succeeded, name in ((1, "output"), (0, "errors")):
            query = (
                "SELECT total(length(line) + 1) FROM requests WHERE batch_id = ? AND succeeded = ?"
            )
            num_bytes = int(self.one(query, batch_id, succeeded)[0])
            made = (owner, "batch_output", f"{batch_id}_{name}.jsonl", num_bytes, None)
            files.append(self.insert_file(*made, batch_id, succeeded) if num_bytes else None)
        self.db.execute(
            "UPDATE batches SET status = ?, ended_at = ?, bytes = 0, failed = total - completed, output_file_id = ?, "
            "error_file_id = ? WHERE id = ?",
            (status, int(clock.wall()), *files, batch_id),
        )


def _caller(owner: Principal) -> str:
    """What limits a caller, beside its name, as JSON."""
    return json.dumps({name: getattr(owner, name) for name in _LIMITS})


def fault(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    """What is wrong with a batch, or with a line of its file, as OpenAI's clients read it."""
    return {"code": code, "line": line, "message": message, "param": None}


def places(values: Collection[Any]) -> str:
    return ",".join("?" * len(values))


def full(owner: str, what: str, held: int, share: int) -> EngineOverloaded:
    quota = Quota(owner, what, held, share)
    return EngineOverloaded(
        f"{held} {what}; the limit is {share}; delete files or wait", retry_after_s=60, quota=quota
    )
