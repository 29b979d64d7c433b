"""ModelBucket: the files of a model in a bucket, beside their SHA256SUMS.

Credentials, region and endpoint come from the variables AWS_…, a web identity or the machine's role, as obstore has it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DownloadError
from ...types.progress import Progress
from .. import checksums
from .address import BucketAddress

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * 2**20
"""Bytes of one request. A piece that fails is asked for again by the library."""
_PIECES_AT_ONCE = 8
_MOST_SUMS_BYTES = 2**20
_MOST_FILES = 1000
_CONNECT_S, _REQUEST_S, _RETRY_S, _RETRIES = 10, 120, 180, 8
_SUM = "sha256"
"""The attribute of an object that holds its SHA-256."""

Count = Callable[[int], None]
"""Is called with the number of bytes that have arrived or been sent."""


class ModelBucket:
    """Any thread may use it. Its methods raise DownloadError, whose message names a remedy."""

    def __init__(self, address: BucketAddress, store: Any = None) -> None:
        """``store``: one of obstore's, for tests."""
        self.address = address
        try:
            import obstore
            from obstore.exceptions import BaseError
        except ImportError:
            raise DownloadError(
                f"{address} needs the package obstore: pip install ./clients/python '.[s3]'"
            ) from None
        self._obstore, self._error = obstore, BaseError
        with self._explained(""):
            self._store = store or _open(address)

    def sums(self) -> str:
        with self._explained(checksums.NAME):
            found = self._obstore.get(self._store, checksums.NAME)
            if found.meta["size"] > _MOST_SUMS_BYTES:
                raise DownloadError(
                    f"{self.address}/{checksums.NAME} has {found.meta['size']} bytes, more than {_MOST_SUMS_BYTES}"
                )
            text = bytes(found.bytes())
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise DownloadError(f"{self.address}/{checksums.NAME} is not text") from None

    def sizes(self) -> dict[str, int]:
        """The bytes of each object of the model by name."""
        with self._explained(""):
            page = next(iter(self._obstore.list(self._store, chunk_size=_MOST_FILES)), [])
            return {each["path"]: each["size"] for each in page}

    def download(self, name: str, part: Path, count: Count = lambda num_bytes: None) -> str:
        """Writes a file to ``part`` and returns its SHA-256. Bytes of an existing ``part`` count as the file's first
        ones, in ``count`` too. Raises OSError too."""
        with self._explained(name):
            head = self._obstore.head(self._store, name)
            size, options = head["size"], {"if_match": head["e_tag"]} if head["e_tag"] else {}
            digest, done = hashlib.sha256(), 0
            with part.open("ab+") as sink, ThreadPoolExecutor(_PIECES_AT_ONCE) as threads:
                sink.seek(0)
                if part.stat().st_size > size:
                    sink.truncate(0)
                while piece := sink.read(PIECE_BYTES):
                    digest.update(piece)
                    done += len(piece)
                    count(len(piece))

                def fetch(start: int) -> bytes:
                    span = (start, min(start + PIECE_BYTES, size))
                    found = self._obstore.get(self._store, name, options={**options, "range": span})
                    return bytes(found.bytes())

                underway: deque[Future[bytes]] = deque()
                starts = iter(range(done, size, PIECE_BYTES))
                try:
                    while True:
                        while (
                            len(underway) < _PIECES_AT_ONCE
                            and (start := next(starts, None)) is not None
                        ):
                            underway.append(threads.submit(fetch, start))
                        if not underway:
                            break
                        piece = underway.popleft().result()
                        sink.write(piece)
                        digest.update(piece)
                        count(len(piece))
                finally:
                    for future in underway:
                        future.cancel()
        return digest.hexdigest()

    def has(self, name: str, num_bytes: int, sha256: str) -> bool:
        """Whether the file was uploaded completely before."""
        with self._explained(name):
            try:
                found = self._obstore.get(self._store, name, options={"head": True})
            except FileNotFoundError:
                return False
            return found.meta["size"] == num_bytes and found.attributes.get(_SUM) == sha256

    def find_sums(self) -> str | None:
        """The text of SHA256SUMS; None if there is none."""
        with self._explained(checksums.NAME):
            try:
                self._obstore.head(self._store, checksums.NAME)
            except FileNotFoundError:
                return None
        return self.sums()

    def upload(
        self, name: str, file: Path | bytes, sha256: str, count: Count = lambda num_bytes: None
    ) -> None:
        """Uploads a file, all or nothing. The bucket checks the SHA-256 of each part. Raises OSError too."""

        def pieces(path: Path) -> Iterator[bytes]:
            with path.open("rb") as source:
                while piece := source.read(PIECE_BYTES):
                    yield piece
                    count(len(piece))

        with self._explained(name, f"the bucket {self.address.bucket} does not exist; create it"):
            self._obstore.put(
                self._store,
                name,
                file if isinstance(file, bytes) else pieces(file),
                attributes={_SUM: sha256},
                chunk_size=PIECE_BYTES,
                max_concurrency=_PIECES_AT_ONCE,
            )

    @contextmanager
    def _explained(self, name: str, absent: str = "") -> Iterator[None]:
        """``absent``: what it means that the object is not there."""
        what = f"{self.address}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError:
            if name == checksums.NAME:
                raise DownloadError(
                    f"{what} does not exist: the address names no model, or its upload has not ended; "
                    f"kestrel-grpc download MODEL --to {self.address} uploads one"
                ) from None
            raise DownloadError(
                f"{what}: {absent}"
                if absent
                else f"{what} does not exist, but {checksums.NAME} lists it"
            ) from None
        except self._error as error:
            reason = str(error).strip().partition("\n")[0][:300]
            if "builder error" in reason and not _allows_http():
                raise DownloadError(
                    f"{what}: {reason}; an endpoint with http needs AWS_ALLOW_HTTP=true"
                ) from None
            if type(error).__name__ == "PreconditionError":
                raise DownloadError(
                    f"{what} changed while it was downloaded; start again"
                ) from None
            raise DownloadError(
                f"{what}: {reason}; check the address, AWS_… (region, endpoint, keys) and the rights of the keys, and "
                "start again: what has arrived is kept"
            ) from None


def parsed_sums(text: str, where: str) -> dict[str, str]:
    """The SHA-256 of each file by name. The names come from elsewhere. Raises DownloadError."""
    try:
        sums = checksums.parse_sums(text, where)
    except CheckpointError as error:
        raise DownloadError(str(error)) from None
    strange = [name for name in sums if name.startswith(".") or not name.isprintable()]
    if strange:
        raise DownloadError(f"{where}: {strange[0]!r} is not the name of a model's file")
    if not 1 <= len(sums) <= _MOST_FILES:
        raise DownloadError(f"{where}: lists {len(sums)} files; there may be 1 to {_MOST_FILES}")
    return sums


def _allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def _open(address: BucketAddress) -> Any:
    from obstore.store import S3Store

    return S3Store(
        address.bucket,
        prefix=address.prefix or None,
        config={"checksum_algorithm": "SHA256"},
        client_options={
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=_REQUEST_S),
            # With options of ours, the library does not read the variable.
            "allow_http": _allows_http(),
        },
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_RETRY_S),
        },
    )


def upload(bucket: ModelBucket, files: Mapping[str, Path], report: Progress) -> tuple[str, ...]:
    """Uploads ``files`` by their names, and returns their addresses. Files that are there already are left, as a model
    in a bucket never changes. Raises DownloadError, also if the address has another model."""
    try:
        sizes = {name: file.stat().st_size for name, file in files.items()}
        sums = {name: checksums.checksum(file, progress=report) for name, file in files.items()}
        text = checksums.format_sums(sums)
        there = bucket.find_sums()
        if there is not None and there != text:
            raise DownloadError(
                f"{bucket.address} holds another model, or another version of it, which servers may be reading; give a "
                "new address"
            )
        total, done = sum(sizes.values()), 0
        for name, file in files.items():
            if not bucket.has(name, sizes[name], sums[name]):
                sent = done

                def count(num_bytes: int, name: str = name) -> None:
                    nonlocal sent
                    sent += num_bytes
                    report(sent, total, f"uploading {name}")

                bucket.upload(name, file, sums[name], count)
            done += sizes[name]
        if there is None:
            data = text.encode()
            bucket.upload(checksums.NAME, data, hashlib.sha256(data).hexdigest())
    except OSError as error:
        raise DownloadError(f"a file can't be read: {error}") from None
    return tuple(f"{bucket.address}/{name}" for name in files)
