"""BudgetLedger: an SQLite file with what principals have used and reserved, for all workers and for restarts.

A turn is one transaction, of some 25 us, on the event loop. The system writes the file to the disk when it likes: a
killed process loses nothing, and a machine that loses its power may lose the last seconds, or the file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kestrel_engine import ConfigError, clock

from .admission.budgets import MOST_REMEMBERED, Account
from .files import writable_by_all

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""Limit on the wait for another process's turn."""
_LOOK_S = 0.01
_PID_BITS = 32
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    principal TEXT PRIMARY KEY, minute_began INTEGER NOT NULL, minute REAL NOT NULL, day_began INTEGER NOT NULL,
    day REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reservations (
    principal TEXT NOT NULL, process INTEGER NOT NULL, tokens REAL NOT NULL, PRIMARY KEY (principal, process))
    WITHOUT ROWID;
"""
_STALE = """
UPDATE used SET minute = minute + tokens, day = day + tokens FROM reservations
    WHERE reservations.principal = used.principal AND process = ?
"""
"""What a killed process had reserved counts as used."""


class BudgetLedger:
    """``path``: of the file, which is made if it is missing. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        self._path, self._process, self._has_complained = path, _process(os.getpid()), False
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
            if writable_by_all(path):
                raise OSError("every user of this machine may write it: chmod o-w")
            self._db = sqlite3.connect(
                path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._write_ahead()
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            self._clean()
        except (OSError, sqlite3.Error) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            shown = f"file={path}"
            raise ConfigError("token_budget", shown, f"the file cannot be used: {why}") from None

    def _write_ahead(self) -> None:
        """SQLite does not wait here while another process opens the file, so this does."""
        for left in reversed(range(round(_WAIT_S / _LOOK_S))):
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not left:
                    raise
            clock.sleep(_LOOK_S)

    def close(self) -> None:
        """The ledger is used no more. Idempotent."""
        self._db.close()

    @contextmanager
    def turn(self, account: Account) -> Iterator[None]:
        """Around a change of ``account``: takes in what other processes did before, and writes what this one does. If
        the file can't be used, this process counts alone, says so once, and writes what it counted later."""
        is_begun = False
        try:
            self._db.execute("BEGIN IMMEDIATE")
            is_begun = True
            self._take(account)
        except sqlite3.Error as error:
            self._complain(error)
        try:
            yield
            if is_begun:
                self._write(account)
        except sqlite3.Error as error:
            self._complain(error)
        finally:
            if is_begun and self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _take(self, account: Account) -> None:
        query = "SELECT minute_began, minute, day_began, day FROM used WHERE principal = ?"
        if (found := self._db.execute(query, (account.principal,)).fetchone()) is not None:
            minute, day = account.windows["minute"], account.windows["day"]
            minute.began, minute.used, day.began, day.used = found
            for window in (minute, day):
                window.used += account.counted - account.stored
        query = "SELECT total(tokens) FROM reservations WHERE principal = ? AND process != ?"
        (account.elsewhere,) = self._db.execute(
            query, (account.principal, self._process)
        ).fetchone()

    def _write(self, account: Account) -> None:
        minute, day = account.windows["minute"], account.windows["day"]
        values = (account.principal, minute.began, minute.used, day.began, day.used)
        self._db.execute("INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?, ?)", values)
        own = (account.principal, self._process, account.reserved)
        self._db.execute("INSERT OR REPLACE INTO reservations VALUES (?, ?, ?)", own)
        self._db.execute("COMMIT")
        account.stored = account.counted
        if self._has_complained:
            self._has_complained = False
            self._wait_at_most(_WAIT_S)

    def _clean(self) -> None:
        """Settles what processes that have ended had reserved, and forgets the principals seen least recently."""
        self._db.execute("BEGIN IMMEDIATE")
        for (process,) in self._db.execute("SELECT DISTINCT process FROM reservations").fetchall():
            if process == self._process or not _lives(process):
                self._db.execute(_STALE, (process,))
                self._db.execute("DELETE FROM reservations WHERE process = ?", (process,))
        query = "SELECT principal FROM used ORDER BY minute_began DESC LIMIT -1 OFFSET ?"
        old = self._db.execute(query, (MOST_REMEMBERED,)).fetchall()
        self._db.executemany("DELETE FROM used WHERE principal = ?", old)
        self._db.execute("COMMIT")

    def _complain(self, error: sqlite3.Error) -> None:
        if not self._has_complained:
            logger.error("%s can't be used, and budgets count alone: %s", self._path, error)
            self._wait_at_most(0)  # Each wait would stop the event loop.
        self._has_complained = True

    def _wait_at_most(self, seconds: float) -> None:
        """How long a turn waits for another process's turn."""
        with suppress(sqlite3.Error):
            self._db.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")


def _process(pid: int) -> int:
    """What names a process: its pid and, on Linux, its begin, because a later process may have the same pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            began = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        began = 0
    return (began << _PID_BITS | pid) & (1 << 63) - 1


def _lives(process: int) -> bool:
    pid = process & (1 << _PID_BITS) - 1
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return _process(pid) == process
