"""Uploads a model to a bucket. SHA256SUMS comes last, so that no server uses an incomplete model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ...errors import DownloadError
from ...types.progress import Progress
from .. import checksums
from .bucket import ModelBucket


def upload(bucket: ModelBucket, files: Mapping[str, Path], report: Progress) -> tuple[str, ...]:
    """Uploads ``files`` by their names, and returns their addresses. Files that are there already are left.

    A model in a bucket never changes: servers may be downloading it. Raises DownloadError, also if the address has
    another model.
    """
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
