"""NodeCache: models of buckets on the disk of a node, which its processes and containers share.

A model's folder is named after the SHA-256 of its SHA256SUMS, so it never changes. It gets this name, by one rename,
only when all its files have arrived and have the right SHA-256. A process that sees the folder may use it, also without
a right to write. The next process resumes an interrupted download. A process uses a model, whose files it maps,
until it ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from ...disk_cache import GIB, DiskCache, NoRoom
from ...errors import DownloadError
from ...types.progress import Progress
from .. import checksums
from ..progress import log_progress
from .address import BucketAddress
from .bucket import ModelBucket, parsed_sums

logger = logging.getLogger(__name__)

_IN_USE: dict[Path, int] = {}
"""The locks of the models that this process uses."""
_FILES_AT_ONCE = 3
_PART = ".part"


class NodeCache:
    """Raises DownloadError, whose message names a remedy."""

    def __init__(
        self, folder: Path, progress: Progress | None = None, most_bytes: int | None = None
    ) -> None:
        """``most_bytes``: limit of all models; those that no process uses make room for new ones. None: no limit."""
        self._folder, self._most_bytes = folder, most_bytes
        self._cache = DiskCache(folder, most_bytes)
        self._report = progress or log_progress("downloading")

    def fetch(self, address: BucketAddress, bucket: ModelBucket | None) -> Path:
        """The folder of the model's files. Downloads what is missing. ``bucket``: None uses the cache only. If the
        bucket does not answer, the model that was used last under this address is taken."""
        try:
            text = None if bucket is None else bucket.sums()
        except DownloadError as error:
            found = self._last(address)
            if found is None:
                raise
            logger.warning("%s; using %s from the cache", error, found)
            return found
        if text is None or bucket is None:
            found = self._last(address)
            if found is None:
                raise DownloadError(
                    f"{address} is not in the cache {self._folder}, and offline was asked for; run kestrel-grpc "
                    "download on a connected machine"
                )
            return found
        sums = parsed_sums(text, f"{address}/{checksums.NAME}")
        place = self._folder / _digest(text)
        self._hold(place)
        try:
            if not _is_complete(place, sums):
                self._download(bucket, place, text, sums)
            self._remember(address, place)
        except OSError as error:
            raise DownloadError(
                f"the cache {self._folder} can't be written: {error.strerror or error}; give a folder of this user "
                "with --cache-dir, or let a user with the right to write download the model first"
            ) from None
        return place

    def _download(self, bucket: ModelBucket, place: Path, text: str, sums: dict[str, str]) -> None:
        """Raises OSError too."""
        with self._cache.downloading(place.name):
            if _is_complete(place, sums):  # Another process has downloaded it meanwhile.
                return
            partial = self._cache.partial(place.name)
            partial.mkdir(exist_ok=True)
            sizes = bucket.sizes()
            total = sum(sizes.get(name, 0) for name in sums)
            self._make_room(place.name, total)
            self._check_space(partial, total)
            counted = _Counted(self._report, total, str(bucket.address))

            def fetch(name: str) -> None:
                _fetch(bucket, partial, name, sums[name], counted)

            with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
                for _ in threads.map(fetch, sums):
                    pass
            (partial / checksums.NAME).write_text(text, "utf-8")
            self._cache.publish(place.name)

    def _hold(self, place: Path) -> None:
        """Marks a model as used. A cache that this process may not write needs a mark of the downloading process."""
        if place not in _IN_USE:
            with suppress(OSError):
                _IN_USE[place] = self._cache.hold(place.name)

    def _make_room(self, name: str, total: int) -> None:
        """Raises OSError too."""
        try:
            self._cache.make_room(name, total)
        except NoRoom as full:
            assert self._most_bytes is not None
            raise DownloadError(
                f"the cache {self._folder} may hold {self._most_bytes / GIB:.2f} GiB (--weights-cache-gib): the model "
                f"takes {total / GIB:.2f} GiB, and models that processes use take {full.used / GIB:.2f} GiB; raise the "
                "limit, or stop servers of other models"
            ) from None

    def _check_space(self, partial: Path, total: int) -> None:
        there = sum(file.stat().st_size for file in partial.iterdir())
        free = shutil.disk_usage(partial).free
        if total - there > free:
            raise DownloadError(
                f"no space left for the model in {self._folder}: it takes {(total - there) / 1e9:.1f} GB more, and "
                f"{free / 1e9:.1f} GB are free; delete folders of models that are not used, or give another folder "
                "with --cache-dir"
            )

    def _last(self, address: BucketAddress) -> Path | None:
        """The model that was used last under this address; None if it is not here."""
        try:
            name = self._reference(address).read_text("utf-8").strip()
            text = (self._folder / name / checksums.NAME).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        place = self._folder / name
        self._hold(place)
        is_here = _digest(text) == name and _is_complete(place, parsed_sums(text, str(place)))
        return place if is_here else None

    def _remember(self, address: BucketAddress, place: Path) -> None:
        reference = self._reference(address)
        with suppress(OSError):  # The cache may be read-only.
            if reference.is_file() and reference.read_text("utf-8").strip() == place.name:
                return
            reference.parent.mkdir(parents=True, exist_ok=True)
            part = reference.with_suffix(f".{os.getpid()}{_PART}")
            part.write_text(f"{place.name}\n", "utf-8")
            part.replace(reference)

    def _reference(self, address: BucketAddress) -> Path:
        return self._folder / "addresses" / _digest(str(address))


class _Counted:
    def __init__(self, report: Progress, total: int, name: str) -> None:
        self._report, self._total, self._name = report, total, name
        self._done, self._lock = 0, Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total, self._name)


def _fetch(bucket: ModelBucket, partial: Path, name: str, sha256: str, counted: _Counted) -> None:
    """Raises DownloadError, OSError."""
    file, part = partial / name, partial / f"{name}{_PART}"
    if file.is_file():  # It got its name after its checksum was right.
        counted(file.stat().st_size)
        return
    resumes = part.is_file() and part.stat().st_size > 0
    found = bucket.download(name, part, counted)
    if found != sha256 and resumes:
        # The first bytes may be of a process that was killed before the disk had them.
        part.unlink()
        found = bucket.download(name, part)
    if found != sha256:
        part.unlink()
        raise DownloadError(
            f"{bucket.address}/{name} has the SHA-256 {found}, and {checksums.NAME} says {sha256}: it is damaged, or "
            "was replaced; upload the model again, to another prefix"
        )
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(file)


def _is_complete(place: Path, sums: dict[str, str]) -> bool:
    names = (checksums.NAME, *sums)
    return all((place / name).is_file() for name in names)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
