"""BudgetLedger: an SQLite file with what principals have used and reserved, for all workers of a server and for
restarts.

A turn is one transaction, of some 25 us, on the event loop. The system writes the file to the disk when it likes: a
killed process loses nothing, and a machine that loses its power may lose the last seconds, or the file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel_engine import ConfigError

from .admission.budgets import MOST_REMEMBERED, Account
from .files import writable_by_all

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""Limit on the wait for another process's turn."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    principal TEXT PRIMARY KEY, minute_began INTEGER NOT NULL, minute REAL NOT NULL, day_began INTEGER NOT NULL,
    day REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (
    principal TEXT NOT NULL, pid INTEGER NOT NULL, tokens REAL NOT NULL, PRIMARY KEY (principal, pid)) WITHOUT ROWID;
"""
_STALE = """
UPDATE used SET minute = minute + tokens, day = day + tokens FROM reserved
    WHERE reserved.principal = used.principal AND pid = ?
"""
"""What a killed process had reserved counts as used."""


class BudgetLedger:
    """``path``: of the file, which is made if it is missing. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        self._path, self._pid, self._has_complained = path, os.getpid(), False
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
            if writable_by_all(path):
                raise OSError("every user of this machine may write it: chmod o-w")
            self._db = sqlite3.connect(
                path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            self._clean()
        except (OSError, sqlite3.Error) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            shown = f"file={path}"
            raise ConfigError("token_budget", shown, f"the file cannot be used: {why}") from None

    def close(self) -> None:
        """The ledger is used no more. Idempotent."""
        self._db.close()

    @contextmanager
    def turn(self, account: Account) -> Iterator[None]:
        """Around a change of ``account``: takes in what other processes did before, and writes what this one does. If
        the file can't be used, this process counts alone, and says so once."""
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
        query = "SELECT total(tokens) FROM reserved WHERE principal = ? AND pid != ?"
        (account.elsewhere,) = self._db.execute(query, (account.principal, self._pid)).fetchone()

    def _write(self, account: Account) -> None:
        minute, day = account.windows["minute"], account.windows["day"]
        values = (account.principal, minute.began, minute.used, day.began, day.used)
        self._db.execute("INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?, ?)", values)
        own = (account.principal, self._pid, account.reserved)
        self._db.execute("INSERT OR REPLACE INTO reserved VALUES (?, ?, ?)", own)
        self._db.execute("COMMIT")
        self._has_complained = False

    def _clean(self) -> None:
        """Settles what processes that have ended had reserved, and forgets the principals seen least recently."""
        self._db.execute("BEGIN IMMEDIATE")
        for (pid,) in self._db.execute("SELECT DISTINCT pid FROM reserved").fetchall():
            if pid == self._pid or not _lives(pid):
                self._db.execute(_STALE, (pid,))
                self._db.execute("DELETE FROM reserved WHERE pid = ?", (pid,))
        query = "SELECT principal FROM used ORDER BY minute_began DESC LIMIT -1 OFFSET ?"
        old = self._db.execute(query, (MOST_REMEMBERED,)).fetchall()
        self._db.executemany("DELETE FROM used WHERE principal = ?", old)
        self._db.execute("COMMIT")

    def _complain(self, error: sqlite3.Error) -> None:
        if not self._has_complained:
            logger.error("%s can't be used, and budgets count alone: %s", self._path, error)
        self._has_complained = True


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
