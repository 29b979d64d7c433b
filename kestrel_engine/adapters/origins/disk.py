"""AdapterDisk: downloaded adapters in a folder, which several processes may share.

Each adapter is a folder of its files and a list of their SHA-256, which are verified whenever it is opened. A damaged
adapter is deleted, and downloaded again. A download goes to a folder of its own, which becomes the adapter's by one
rename. All together take at most ``max_bytes``, with the downloads that run; the least recently used ones that nobody
reads are deleted.

Locks (flock) order the processes, and the kernel drops them when a process ends: one for a download (``flights``), one
for the room on the disk (``room``), one for each reader on the adapter's list, and one for each running download.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, Any

from ... import clock
from ...errors import AdaptersFull, AdapterUnavailable, ConfigError, EngineClosed
from .staging import NO_SPACE, Staging

logger = logging.getLogger(__name__)

Fetch = Callable[[Staging], Mapping[str, str | None]]
"""Downloads an adapter's files. Returns the SHA-256 of each by name; None where its source does not give it."""

LIST_NAME = "files.json"
_MAX_LIST_BYTES = 1 << 16
_ENTRY = re.compile(r"[0-9a-f]{40}")
_PARTIAL = ".partial-"
_GONE = ".gone-"
_LOCK_NAME = "lock"
_FLIGHTS = 64
"""Files that lock downloads. Adapters share them by their key."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Kept:
    path: Path
    used_at: int
    num_bytes: int


class AdapterDisk:
    """Used by the threads of one library. ``most``: bytes of the largest adapter. Raises ConfigError if the folder
    can't be written."""

    def __init__(self, folder: Path, max_bytes: int, most: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._most = min(most, max_bytes)
        self._closing = Event()
        try:
            with self._locked("room"):
                self._sweep()
        except OSError as error:
            raise ConfigError(
                "cache_dir", str(folder), f"can't be written: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Ends downloads that run."""
        self._closing.set()

    @contextmanager
    def open(self, key: str, name: str, fetch: Fetch | None) -> Iterator[Path]:
        """The folder of the adapter's files, which stays while the context is open. ``key``: names its content.
        ``fetch``: downloads it if it is not there; None where nothing may be downloaded.

        Raises AdapterUnavailable, AdaptersFull, and what ``fetch`` raises.
        """
        digest = hashlib.sha256(key.encode()).hexdigest()[:40]
        try:
            lease = self._taken(digest)
            if lease is None and fetch is not None:
                with self._locked(f"flight-{int(digest[:8], 16) % _FLIGHTS}"):
                    # Another process may have downloaded it meanwhile.
                    lease = self._taken(digest) or self._downloaded(key, digest, name, fetch)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise AdaptersFull(
                    f"the disk of downloaded adapters has no space for {name!r}"
                ) from None
            raise AdapterUnavailable(
                f"{name!r} could not be stored on this server's disk"
            ) from error
        if lease is None:
            reason = "is not on this server's disk, and it is offline"
            if fetch is not None:
                reason = "was damaged on this server's disk; try again"
            raise AdapterUnavailable(f"{name!r} {reason}")
        with lease:
            yield self._folder / digest

    def latest(self, name: str) -> str | None:
        """The key of the adapter that was used last of those that were downloaded under this name; None if there is
        none."""
        found = None
        for entry in self._entries():
            listed = _listed(entry.path)
            if listed is not None and listed.get("name") == name:
                if found is None or entry.used_at > found[0]:
                    found = entry.used_at, str(listed.get("key"))
        return None if found is None else found[1]

    def _taken(self, digest: str) -> IO[bytes] | None:
        """The adapter's list, with a lock that keeps its files; None if it is not there. Deletes a damaged one."""
        entry = self._folder / digest
        try:
            opened = (entry / LIST_NAME).open("rb")
        except OSError:
            return None
        fcntl.flock(opened, fcntl.LOCK_SH)
        try:
            is_there = os.path.samestat(os.fstat(opened.fileno()), os.stat(entry / LIST_NAME))
        except OSError:
            is_there = False
        if is_there and (damage := _damage(entry)) is None:
            now = time.time_ns()  # The file system's own clock ticks in milliseconds.
            with suppress(OSError):
                os.utime(entry / LIST_NAME, ns=(now, now))
            return opened
        opened.close()
        if is_there:
            logger.warning("adapter %s on the disk is damaged (%s) and is deleted", digest, damage)
            with self._locked("room"):
                self._delete(entry, damaged=True)
        return None

    def _downloaded(self, key: str, digest: str, name: str, fetch: Fetch) -> IO[bytes] | None:
        """As ``_taken``, after a download."""
        with self._locked("room"):
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._folder))
            lock = (partial / _LOCK_NAME).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)

        def make_room(num_bytes: int) -> None:
            with self._locked("room"):
                self._make_room(num_bytes, name)
                lock.write(str(num_bytes))
                lock.flush()

        try:
            expected = fetch(Staging(name, partial, self._closing, self._most, make_room))
            files = {file: _sha256(partial / file) for file in expected}
            if any(told not in (None, files[file]) for file, told in expected.items()):
                raise AdapterUnavailable(f"{name!r} arrived damaged; try again")
            listed = {"key": key, "name": name, "files": files}
            (partial / LIST_NAME).write_text(json.dumps(listed), encoding="utf-8")
            with self._locked("room"):
                if (self._folder / digest).exists():  # Without its list.
                    self._delete(self._folder / digest, damaged=True)
                (partial / _LOCK_NAME).unlink()
                os.rename(partial, self._folder / digest)
        finally:
            lock.close()
            shutil.rmtree(partial, ignore_errors=True)
        return self._taken(digest)

    def _make_room(self, num_bytes: int, name: str) -> None:
        """Deletes adapters until another one fits. Raises AdaptersFull."""
        used = self._sweep()
        entries = sorted(self._entries(), key=lambda entry: entry.used_at)
        used += sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if used + num_bytes <= self._max_bytes:
                return
            if self._delete(entry.path):
                used -= entry.num_bytes
        if used + num_bytes > self._max_bytes:
            raise AdaptersFull(
                f"downloads that run and adapters that are being read take {used} of {self._max_bytes} bytes of the "
                f"disk; {name!r} takes {num_bytes} more"
            )

    def _sweep(self) -> int:
        """Deletes what processes left that ended. Returns the bytes that running downloads have reserved."""
        reserved = 0
        for path in self._folder.iterdir():
            if path.name.startswith(_PARTIAL):
                reserved += _reserved(path)
            elif path.name.startswith(_GONE):
                shutil.rmtree(path, ignore_errors=True)
        return reserved

    def _entries(self) -> Iterator[_Kept]:
        for path in self._folder.iterdir():
            if not _ENTRY.fullmatch(path.name):
                continue
            try:
                sizes = [file.stat().st_size for file in path.iterdir()]
                used_at = (path / LIST_NAME).stat().st_mtime_ns
            except OSError:  # It is being deleted, or damaged: the first to go.
                sizes, used_at = [0], 0
            yield _Kept(path, used_at, sum(sizes))

    def _delete(self, entry: Path, *, damaged: bool = False) -> bool:
        """Deletes an adapter unless it is being read, or damaged. Returns whether it is gone."""
        gone = self._folder / f"{_GONE}{entry.name}-{os.getpid()}"
        try:
            with (entry / LIST_NAME).open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(entry, gone)
        except OSError as error:
            if isinstance(error, BlockingIOError) and not damaged:
                return False
            try:
                os.rename(entry, gone)
            except OSError:
                return not entry.exists()
        shutil.rmtree(gone, ignore_errors=True)
        return True

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Holds a lock among all processes. Raises EngineClosed if the engine is shut down meanwhile."""
        locks = self._folder / "locks"
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (locks / name).open("w") as opened:
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.wait(self._closing, _POLL_S):
                        raise EngineClosed("the engine was shut down") from None
            yield


def _reserved(partial: Path) -> int:
    """The bytes that a running download reserved. Deletes one whose process has ended."""
    try:
        with (partial / _LOCK_NAME).open("r+") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(opened.read() or 0)
    except (OSError, ValueError):
        pass
    shutil.rmtree(partial, ignore_errors=True)
    return 0


def _listed(entry: Path) -> Mapping[str, Any] | None:
    """The adapter's list; None if it can't be read."""
    try:
        with (entry / LIST_NAME).open("rb") as opened:
            listed = json.loads(opened.read(_MAX_LIST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return listed if isinstance(listed, dict) else None


def _damage(entry: Path) -> str | None:
    """Why the adapter's files are not those that were downloaded; None if they are."""
    listed = _listed(entry)
    files = None if listed is None else listed.get("files")
    if not isinstance(files, dict) or not files:
        return f"{LIST_NAME} can't be read"
    try:
        if {each.name for each in entry.iterdir()} != {*files, LIST_NAME}:
            return "files are missing, or others are there"
        for name, expected in files.items():
            if _sha256(entry / name) != expected:
                return f"{name} has another SHA-256"
    except OSError as error:
        return str(error.strerror)
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
