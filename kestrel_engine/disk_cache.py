"""DiskCache: a folder of downloads that the processes of a machine share, with a limit on its bytes.

An entry is a folder that never changes, named by 40 hexadecimal digits. It gets this name by one rename, when all its
files have arrived. Locks (flock) order the processes, and the kernel drops them when a process ends: each user holds a
shared lock on a file, and each download an exclusive one on another. Only an entry that nobody uses is deleted, the
least recently used first. The time of the users' file is that of the last use. Locks work among the containers of one
machine, but not on every network file system.
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
from threading import Event

from . import clock
from .errors import EngineClosed

logger = logging.getLogger(__name__)

GIB = 1024**3
_ENTRY = re.compile(r"(?P<name>[0-9a-f]{40})(?P<kind>|\.partial|\.deleted-\d+)")
_POLL_S, _SAY_S = 0.05, 15.0


class NoRoom(Exception):
    """A download does not fit. ``used``: bytes of what is in use, and of other downloads."""

    def __init__(self, used: int) -> None:
        self.used = used


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """``kind``: "", or the suffix of a download that is not complete, or of what is being deleted."""

    path: Path
    name: str
    kind: str
    num_bytes: int
    used_at: float


class DiskCache:
    """``most_bytes``: limit of all entries; None: no limit, and nothing is deleted. ``closing``: ends what waits."""

    def __init__(self, folder: Path, most_bytes: int | None, closing: Event | None = None) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._locks, self._closing = folder / "locks", closing or Event()

    def place(self, name: str) -> Path:
        """Where the entry is, if it is complete."""
        return self._folder / name

    def partial(self, name: str) -> Path:
        """The folder that takes the files of a download."""
        return self._folder / f"{name}.partial"

    def hold(self, name: str) -> int:
        """Marks an entry as used until the returned descriptor is closed. Call it before looking whether it is there.
        Raises OSError where this process may not write and nobody has marked it."""
        # Waits only while the entry is being deleted.
        opened = self._lock(self._locks / f"{name}.use", fcntl.LOCK_SH)
        now = time.time_ns()  # The kernel's own stamps stand still for some milliseconds.
        with suppress(OSError):
            os.utime(self._locks / f"{name}.use", ns=(now, now))
        return opened

    @contextmanager
    def downloading(self, name: str) -> Iterator[None]:
        """Holds the lock for a download. Waits for another process that has it. Raises OSError, and EngineClosed if
        ``closing`` is set meanwhile."""
        said_at = clock.now()
        while True:
            try:
                opened = self._lock(self._locks / name, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.now() - said_at >= _SAY_S:
                    said_at = clock.now()
                    logger.info("waiting for another process of this node, which downloads it")
                if clock.wait(self._closing, _POLL_S):
                    raise EngineClosed("the engine was shut down") from None
        try:
            yield
        finally:
            with suppress(OSError):
                if not self.partial(name).exists():
                    self._planned(name).unlink(missing_ok=True)
                (self._locks / name).unlink()
            os.close(opened)

    def make_room(self, name: str, num_bytes: int) -> None:
        """Deletes what nobody uses until there is room for a download, whose lock the caller holds. Raises NoRoom, and
        OSError."""
        if self._most_bytes is None:
            return
        room = self._lock(self._locks / "room", fcntl.LOCK_EX)
        try:
            self._planned(name).write_text(str(num_bytes))
            entries = [
                each for each in self.entries() if each.name != name or each.kind == ".deleted"
            ]
            used = sum(each.num_bytes for each in entries)
            for entry in sorted(entries, key=lambda each: (each.kind != ".deleted", each.used_at)):
                if used + num_bytes <= self._most_bytes:
                    break
                if self._delete(entry):
                    used -= entry.num_bytes
            if used + num_bytes > self._most_bytes:
                self._planned(name).unlink()
                raise NoRoom(used)
        finally:
            os.close(room)

    def publish(self, name: str) -> Path:
        """Completes a download. It replaces an entry of this name, which is damaged. Raises OSError."""
        self.discard(name)
        return self.partial(name).rename(self.place(name))

    def discard(self, name: str) -> None:
        """Deletes an entry, even if processes use it. Raises OSError."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._hidden(name, self.place(name)))

    def sweep(self) -> None:
        """Deletes what processes have left that ended: downloads, and what was being deleted. Raises OSError."""
        self._locks.mkdir(parents=True, exist_ok=True)
        for entry in self.entries():
            if entry.kind:
                self._delete(entry)

    def entries(self) -> Iterator[CacheEntry]:
        """All that is in the folder, in no order."""
        for path in self._folder.iterdir():
            found = _ENTRY.fullmatch(path.name)
            if found is None or not path.is_dir():
                continue
            name, kind = found["name"], found["kind"].partition("-")[0]
            num_bytes, used_at = _size(path), path.stat().st_mtime
            if kind == ".partial":
                with suppress(OSError, ValueError):
                    num_bytes = max(num_bytes, int(self._planned(name).read_text()))
            elif not kind:
                with suppress(OSError):
                    used_at = (self._locks / f"{name}.use").stat().st_mtime
            yield CacheEntry(path, name, kind, num_bytes, used_at)

    def _planned(self, name: str) -> Path:
        """The file with the bytes that a download takes, so that others which begin meanwhile count them."""
        return self._locks / f"{name}.bytes"

    def _hidden(self, name: str, path: Path) -> Path:
        """Renames a folder, so that from now on processes find nothing there."""
        return path.rename(self._folder / f"{name}.deleted-{time.time_ns()}")

    def _delete(self, entry: CacheEntry) -> bool:
        """Returns whether it is gone. False if a process uses or downloads it, or if another user owns it."""
        lock = self._locks / (entry.name if entry.kind else f"{entry.name}.use")
        try:
            if entry.kind == ".deleted":
                shutil.rmtree(entry.path)
                return True
            opened = self._lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                gone = self._hidden(entry.name, entry.path)
                for file in (lock, self._planned(entry.name)):
                    file.unlink(missing_ok=True)
            finally:
                os.close(opened)
            shutil.rmtree(gone)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning("%s can't be deleted: %s", entry.path, error.strerror or error)
            return False
        logger.info(
            "deleted %s from the cache, which made room: %.2f GiB, last used %s",
            entry.path.name,
            entry.num_bytes / GIB,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at)),
        )
        return True

    def _lock(self, path: Path, how: int) -> int:
        """Returns the descriptor of a file with a lock. Raises OSError; BlockingIOError if another process has it.

        Reading is enough for a lock: another user's process may have made the file, or the cache be read-only.
        """
        while True:
            try:
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._locks.mkdir(parents=True, exist_ok=True)
                opened = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(opened, how)
                if os.path.samestat(os.fstat(opened), os.stat(path)):
                    return opened
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(opened)
                raise
            os.close(opened)  # The file was deleted with its entry meanwhile.


def _size(folder: Path) -> int:
    total = 0
    with suppress(OSError):  # It is being deleted.
        for file in folder.iterdir():
            with suppress(OSError):  # A download renames its files.
                total += file.stat().st_size
    return total
