"""The SQLite file of batches: its tables (schema.sql), and how one process has it alone."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from string import Template

BATCH_BYTES = 16 * 1024
"""What each batch counts at least, so that a caller has at most some 65,000 of them, however small."""
_SCHEMA = Template(Path(__file__).with_name("schema.sql").read_text("utf-8")).substitute(
    batch_bytes=BATCH_BYTES
)


def open_database(path: str) -> sqlite3.Connection:
    """Raises OSError, and sqlite3.Error, also if another process has the file open."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # It holds what callers have sent.
    db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
        db.execute(f"PRAGMA {pragma}")
    db.executescript(_SCHEMA)
    if "off_peak" not in {row["name"] for row in db.execute("PRAGMA table_info(batches)")}:
        db.execute("ALTER TABLE batches ADD COLUMN off_peak INTEGER NOT NULL DEFAULT 0")
    return db
