"""Limits on the parts of a file that make decoding expensive, whatever its pixels: a JPEG's scans and a TIFF's pages.

Each scan of a progressive JPEG visits all coefficients, even a scan of twelve bytes that changes nothing. With the
largest accepted number of pixels this takes 11 ms, so a file of 200 KB could take minutes. libvips visits each page of
a TIFF to count the pages, which takes 16 us a page. Encoders write about ten scans, and optimisers up to 64.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator

MOST_SCANS = 100
MOST_PAGES = 10_000

_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""A marker, except restarts. 0xff 0x00 is a byte of the coded image, and 0xff 0xff is padding."""

_ALONE = frozenset(b"\x01\xd8")
"""Markers without a length."""


def excess(data: bytes, name: str) -> str | None:
    """Describes what an image of format ``name`` has too many of, as words after "has"; None if it is acceptable."""
    if name == "JPEG" and data.count(_SCAN) > MOST_SCANS and num_scans(data) > MOST_SCANS:
        return f"more than {MOST_SCANS} scans"
    if name == "TIFF" and num_pages(data) > MOST_PAGES:
        return f"more than {MOST_PAGES} pages"
    return None


def num_scans(data: bytes) -> int:
    """Counts the scans of a JPEG, up to its end or its first invalid marker, and at most to MOST_SCANS + 1. Thumbnails
    in other segments and data after the image do not count."""
    scans = (marker for marker, _ in jpeg_markers(data) if marker == 0xDA)
    return sum(1 for _ in itertools.islice(scans, MOST_SCANS + 1))


def jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields (marker, position after it) up to the end of a JPEG, without those inside of segments."""
    at = 0
    while (found := _MARKER.search(data, at)) is not None:
        (marker,), at = found[1], found.end()
        if marker == 0xD9:
            break
        yield marker, at
        if marker not in _ALONE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))


def num_pages(data: bytes) -> int:
    """Counts the directories in a TIFF's chain, up to its end, its first invalid offset or MOST_PAGES + 1."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    offset, entries, entry = ("Q", "Q", 20) if big else ("I", "H", 12)
    count = 0
    try:
        (at,) = struct.unpack_from(order + offset, data, 8 if big else 4)
        while at and count <= MOST_PAGES:
            (number,) = struct.unpack_from(order + entries, data, at)
            at += struct.calcsize(order + entries) + number * entry
            (at,) = struct.unpack_from(order + offset, data, at)
            count += 1
    except (struct.error, OverflowError):  # An offset points beyond the end.
        pass
    return count
