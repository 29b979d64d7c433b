"""CacheRoom: which models of a node's cache are in use, and which ones make room for a new one.

A process that uses a model holds a shared lock (flock) on a file, which the kernel drops when the process ends. Only a
model whose lock nobody holds is deleted, the least recently used first. The time of this file is that of the last use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import DownloadError

logger = logging.getLogger(__name__)

GIB = 1024**3
_ENTRY = re.compile(r"(?P<name>[0-9a-f]{40})(?P<kind>|\.partial|\.damaged-\d+|\.deleted-\d+)")
_IN_USE: dict[Path, int] = {}
"""The locks that this process holds until it ends: its model's files are mapped into memory."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    name: str
    kind: Literal["", "partial", "left"]
    num_bytes: int
    used_at: float


class CacheRoom:
    """``most_bytes``: limit of all models in ``folder``; None: no limit, and nothing is deleted."""

    def __init__(self, folder: Path, most_bytes: int | None) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._locks = folder / "locks"

    def hold(self, name: str) -> None:
        """Marks a model as used by this process, until the process ends. Call it before looking whether it is there.

        In a cache that this process may not write, a model can only be marked if the one that downloaded it did so.
        """
        path = self._locks / f"{name}.use"
        if path in _IN_USE:
            return
        with suppress(OSError):
            opened = self._opened(path)
            fcntl.flock(opened, fcntl.LOCK_SH)  # Waits only while it is being deleted.
            _IN_USE[path] = opened
            os.utime(path)

    def make(self, name: str, num_bytes: int) -> None:
        """Deletes models that nobody uses until there is room for a new one. The caller holds the lock ``name`` while
        it downloads. Raises DownloadError, and OSError."""
        if self._most_bytes is None:
            return
        planned = self._planned(name)
        with self._locked(self._locks / "room", wait=True):
            planned.write_text(str(num_bytes))
            entries = [each for each in self._entries() if each.name != name or each.kind == "left"]
            used = sum(each.num_bytes for each in entries)
            for entry in sorted(entries, key=lambda each: (each.kind != "left", each.used_at)):
                if used + num_bytes <= self._most_bytes:
                    break
                if self._delete(entry):
                    used -= entry.num_bytes
            if used + num_bytes > self._most_bytes:
                planned.unlink()
                raise DownloadError(
                    f"the cache {self._folder} may hold {self._most_bytes / GIB:.2f} GiB (--weights-cache-gib): the "
                    f"model takes {num_bytes / GIB:.2f} GiB, and models that processes use take {used / GIB:.2f} GiB; "
                    "raise the limit, or stop servers of other models"
                )

    def made(self, name: str) -> None:
        """The model has arrived."""
        with suppress(OSError):
            self._planned(name).unlink()

    def _planned(self, name: str) -> Path:
        """The file with the bytes that a download takes, so that others which begin meanwhile count them."""
        return self._locks / f"{name}.bytes"

    def _entries(self) -> Iterator[_Entry]:
        for path in self._folder.iterdir():
            found = _ENTRY.fullmatch(path.name)
            if found is None or not path.is_dir():
                continue
            name, kind = found["name"], found["kind"]
            num_bytes, used_at = _size(path), path.stat().st_mtime
            if kind == ".partial":
                with suppress(OSError, ValueError):
                    num_bytes = max(num_bytes, int(self._planned(name).read_text()))
                yield _Entry(path, name, "partial", num_bytes, used_at)
            elif kind:
                yield _Entry(path, name, "left", num_bytes, used_at)
            else:
                with suppress(OSError):
                    used_at = (self._locks / f"{name}.use").stat().st_mtime
                yield _Entry(path, name, "", num_bytes, used_at)

    def _delete(self, entry: _Entry) -> bool:
        """Returns whether it is gone. False if a process uses or downloads it, or if another user owns it."""
        try:
            if entry.kind == "left":
                shutil.rmtree(entry.path)
                return True
            # A download holds the lock of the model's name.
            lock = f"{entry.name}.use" if entry.kind == "" else entry.name
            with self._locked(self._locks / lock, wait=False) as is_mine:
                if not is_mine:
                    return False
                gone = self._folder / f"{entry.name}.deleted-{time.time_ns()}"
                entry.path.rename(gone)  # From now on, processes that look for it find nothing.
            shutil.rmtree(gone)
        except OSError as error:
            logger.warning("%s can't be deleted: %s", entry.path, error.strerror or error)
            return False
        logger.info(
            "deleted %s from the cache, which made room for another model: %.2f GiB, last used %s",
            entry.path.name,
            entry.num_bytes / GIB,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at)),
        )
        return True

    @contextmanager
    def _locked(self, path: Path, *, wait: bool) -> Iterator[bool]:
        """Whether this process has the lock, alone. Raises OSError."""
        opened = self._opened(path)
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(opened)

    def _opened(self, path: Path) -> int:
        """Reading is enough for a lock: another user's process may have made the file, or the cache be read-only."""
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._locks.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _size(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(OSError):  # A download renames its files.
            total += file.stat().st_size
    return total
