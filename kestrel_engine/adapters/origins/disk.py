"""AdapterDisk: downloaded adapters in a folder, which several processes may share.

Each adapter's folder lists the SHA-256 of its files, which are verified whenever it is opened. A damaged adapter is
deleted and downloaded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from ...checkpoint.checksums import checksum
from ...disk_cache import DiskCache, NoRoom
from ...errors import AdaptersFull, AdapterUnavailable, ConfigError
from ...small_files import read_small_json
from .staging import NO_SPACE, Staging

logger = logging.getLogger(__name__)

Fetch = Callable[[Staging], Mapping[str, str | None]]
"""Downloads an adapter's files. Returns the SHA-256 of each by name; None where its source does not give it."""

LIST_NAME = "files.json"
_MAX_LIST_BYTES = 1 << 16


class AdapterDisk:
    """Used by the threads of one library. ``max_bytes``: limit of all adapters and running downloads. ``most``: bytes
    of the largest adapter. Raises ConfigError if the folder can't be written."""

    def __init__(self, folder: Path, max_bytes: int, most: int) -> None:
        self._max_bytes, self._most = max_bytes, min(most, max_bytes)
        self._closing = Event()
        self._cache = DiskCache(folder, max_bytes, self._closing)
        try:
            self._cache.sweep()
        except OSError as error:
            raise ConfigError(
                "cache_dir", str(folder), f"can't be written: {error.strerror}"
            ) from None

    def close(self) -> None:
        self._closing.set()

    @contextmanager
    def open(self, key: str, name: str, fetch: Fetch | None) -> Iterator[Path]:
        """The folder of the adapter's files, which stays while the context is open. ``key``: names its content.
        ``fetch``: downloads it if it is not there; None where nothing may be downloaded. Raises AdapterUnavailable,
        AdaptersFull, and what ``fetch`` raises."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:40]
        try:
            lease = self._taken(digest)
            if lease is None and fetch is not None:
                with self._cache.downloading(digest):
                    # Another process may have downloaded it meanwhile.
                    lease = self._taken(digest)
                    if lease is None:
                        self._download(key, digest, name, fetch)
                        lease = self._taken(digest)
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
        try:
            yield self._cache.place(digest)
        finally:
            os.close(lease)

    def latest(self, name: str) -> str | None:
        """The key of the adapter that was used last under this name; None if there is none."""
        entries = [each for each in self._cache.entries() if not each.kind]
        for entry in sorted(entries, key=lambda each: each.used_at, reverse=True):
            listed = _listed(entry.path)
            if listed is not None and listed.get("name") == name:
                return str(listed.get("key"))
        return None

    def _taken(self, digest: str) -> int | None:
        """A descriptor that keeps the adapter's files until it is closed; None if absent. Deletes a damaged one."""
        entry = self._cache.place(digest)
        if not entry.is_dir():
            return None
        lease = self._cache.hold(digest)
        if not entry.is_dir():  # It was deleted meanwhile.
            os.close(lease)
            return None
        damage = _damage(entry)
        if damage is None:
            return lease
        os.close(lease)
        logger.warning("adapter %s on the disk is damaged (%s) and is deleted", digest, damage)
        self._cache.discard(digest)
        return None

    def _download(self, key: str, digest: str, name: str, fetch: Fetch) -> None:
        partial = self._cache.partial(digest)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

        def make_room(num_bytes: int) -> None:
            try:
                self._cache.make_room(digest, num_bytes)
            except NoRoom as full:
                raise AdaptersFull(
                    f"downloads that run and adapters that are being read take {full.used} of {self._max_bytes} bytes "
                    f"of the disk; {name!r} takes {num_bytes} more"
                ) from None

        try:
            expected = fetch(Staging(name, partial, self._closing, self._most, make_room))
            files = {file: checksum(partial / file) for file in expected}
            if any(known not in (None, files[file]) for file, known in expected.items()):
                raise AdapterUnavailable(f"{name!r} arrived damaged; try again")
            listed = {"key": key, "name": name, "files": files}
            (partial / LIST_NAME).write_text(json.dumps(listed), encoding="utf-8")
            self._cache.publish(digest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _listed(entry: Path) -> Mapping[str, Any] | None:
    try:
        listed = read_small_json(entry / LIST_NAME, _MAX_LIST_BYTES)
    except (OSError, ValueError):
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
            if checksum(entry / name) != expected:
                return f"{name} has another SHA-256"
    except OSError as error:
        return str(error.strerror)
    return None
