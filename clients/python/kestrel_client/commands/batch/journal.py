"""Journal: the file of results. It has a complete line for each row that is done, and nothing else.

A line is appended with one write, so a killed process leaves at most one incomplete line, at the end. The next run
removes that line and computes its row again. A file beside it (``.run``) says which tasks the results are of, so that
results of other tasks are never mixed with them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import json_text
from ..parser import CommandError

Identity = tuple[str, int | None]
_SYNC_S = 5.0
_FRESH = "name another --output, or start over with --fresh"


class Journal:
    """The results in ``file``. One process at a time has it open; close it with ``close``. ``done``: the rows that have
    results.

    ``run``: the tasks and options of this run, as plain values. ``fresh``: delete what is there. ``without_failed``:
    remove the rows that failed. Raises CommandError if the file belongs to another run or to another process.
    """

    def __init__(
        self, file: Path, run: dict[str, Any], *, fresh: bool = False, without_failed: bool = False
    ) -> None:
        self.file = file
        self.digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]
        """Of the tasks and options."""
        self._description = file.with_name(f"{file.name}.run")
        self.done: set[Identity] = set()
        self.failed = 0
        """Rows that failed, or of which a task failed."""
        self._opened = -1
        try:
            self._open()
            if fresh:
                os.ftruncate(self._opened, 0)
                self._description.unlink(missing_ok=True)
            self._check(run)
            if without_failed:
                self._remove_failed()
            self._read()
        except OSError as error:
            self.close()
            raise CommandError(f"cannot write {str(file)!r}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        self._synced = time.monotonic()

    def append(self, line: dict[str, Any]) -> None:
        """Writes the result of a row. Raises OSError."""
        data = f"{json_text(line)}\n".encode()
        end = os.lseek(self._opened, 0, os.SEEK_END)
        while data:
            try:
                data = data[os.write(self._opened, data) :]
            except OSError:  # The disk is full. An incomplete line would hide the next one.
                os.ftruncate(self._opened, end)
                raise
        self._note(line)
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._opened)
            self._synced = time.monotonic()

    def lines(self) -> Iterator[dict[str, Any]]:
        """The results so far."""
        with self.file.open(encoding="utf-8") as opened:
            for line in opened:
                yield json.loads(line)

    def close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        self._opened = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if not stat.S_ISREG(os.fstat(self._opened).st_mode):
            raise CommandError(f"cannot write {str(self.file)!r}: results need a regular file")
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another command is writing {str(self.file)!r}") from None

    def _check(self, run: dict[str, Any]) -> None:
        """Compares ``run`` with the description, which is written if there are no results yet."""
        is_new = os.fstat(self._opened).st_size == 0
        try:
            before = {} if is_new else json.loads(self._description.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            raise CommandError(
                f"{str(self.file)!r} exists and is not a file of results; {_FRESH}"
            ) from None
        if is_new:
            draft = self._description.with_name(f"{self._description.name}.tmp")
            draft.write_text(json_text(run, indent=1), encoding="utf-8")
            draft.replace(self._description)
        elif before != run:
            others = [name for name in run if before.get(name) != run[name]]
            raise CommandError(
                f"{str(self.file)!r} holds results of other {' and '.join(others)}; {_FRESH}"
            )

    def _note(self, line: dict[str, Any]) -> None:
        self.done.add((line["image"], line.get("row")))
        self.failed += has_failed(line)

    def _read(self) -> None:
        """Notes the rows that are done, and removes an incomplete last line."""
        self.done, self.failed, end = set(), 0, 0
        with self.file.open("rb") as opened:
            for number, data in enumerate(opened, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    self._note(json.loads(data))
                except (ValueError, KeyError, TypeError):
                    raise CommandError(
                        f"{str(self.file)!r}: line {number} is not a result; {_FRESH}"
                    ) from None
                end += len(data)
        os.ftruncate(self._opened, end)

    def _remove_failed(self) -> None:
        self._read()
        kept = self.file.with_name(f"{self.file.name}.tmp")
        with kept.open("w", encoding="utf-8") as opened:
            for line in self.lines():
                if not has_failed(line):
                    opened.write(f"{json_text(line)}\n")
            opened.flush()
            os.fsync(opened.fileno())
        kept.replace(self.file)
        self.close()
        self._open()


def has_failed(line: dict[str, Any]) -> bool:
    """Whether the row, or one of its tasks, failed."""
    return "error" in line or any("error" in result for result in line["tasks"].values())
