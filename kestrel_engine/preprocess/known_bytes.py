"""KnownBytes: encoded images that came before, with their digests, so that a repeated one need not be hashed.

To compare two megabytes takes 0.1 ms, to compute their SHA-256 1.3 (one core of an AMD EPYC).
"""

from __future__ import annotations

from typing import TypeAlias

from ..byte_cache import ByteCache

_PART = 32
"""Bytes of each part of an image by which it is found: the middle and the end. Formats begin alike."""

_LARGEST_SHARE = 4
"""An image may take a quarter of the limit, so that no single one drops all others."""

RECORD_BYTES = 1024
"""What an image takes beside its bytes: some 600 measured. Without it, a caller could fill the memory with images of a
few bytes."""

_Mark: TypeAlias = tuple[str, int, bytes, bytes]


class KnownBytes:
    """``max_bytes``: limit on the encoded bytes, with RECORD_BYTES for each image; with 0 nothing is kept. Namespaces
    share nothing: the time of an answer must not tell what another namespace has sent. Belongs to one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: ByteCache[_Mark, tuple[bytes, bytes]] = ByteCache(max_bytes)
        """Encoded bytes with their digest. Of images with one mark, the last one is kept."""

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def find(self, source: bytes, namespace: str) -> bytes | None:
        """Returns the digest of ``source`` if all of its bytes came before in the namespace."""
        kept = self._kept.find(_mark(source, namespace))
        return None if kept is None or kept[0] != source else kept[1]

    def keep(self, source: bytes, namespace: str, digest: bytes) -> None:
        num_bytes = len(source) + RECORD_BYTES
        if num_bytes * _LARGEST_SHARE <= self._kept.max_bytes:
            self._kept.keep(_mark(source, namespace), (source, digest), num_bytes)

    def flush(self) -> None:
        self._kept.flush()


def _mark(source: bytes, namespace: str) -> _Mark:
    middle = len(source) // 2
    return namespace, len(source), source[middle : middle + _PART], source[-_PART:]
