"""What makes a small file dear to read, whatever its size in pixels: a JPEG's scans, a TIFF's pages. Owns their bounds.

Each scan of a progressive JPEG goes over all coefficients, even one of twelve bytes that changes nothing: 11 ms at the
most pixels that are taken, so that 200 KB would keep a thread busy for minutes. Each page of a TIFF is visited to be
counted, 16 us: the most bytes that are taken hold five seconds of them. Encoders write some ten scans, optimisers up to
64; libtiff draws the line at 100 scans too for the JPEGs that it reads.
"""

from __future__ import annotations

import re
import struct

MOST_SCANS = 100
MOST_PAGES = 10_000

_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""A marker but for the restarts; 0xff 0x00 is a byte of the coded image, 0xff 0xff is padding."""

_ALONE = frozenset(b"\x01\xd8")
"""Markers without a length."""


def excess(data: bytes, name: str) -> str | None:
    """What an image of format ``name`` has too much of, in words to come after "has"; None if nothing."""
    if name == "JPEG" and data.count(_SCAN) > MOST_SCANS and num_scans(data) > MOST_SCANS:
        return f"more than {MOST_SCANS} scans"
    if name == "TIFF" and num_pages(data) > MOST_PAGES:
        return f"more than {MOST_PAGES} pages"
    return None


def num_scans(data: bytes) -> int:
    """Scans of a JPEG up to its end or to where it is no JPEG, MOST_SCANS + 1 at most. Thumbnails in other segments and
    what follows the image don't count."""
    count, at = 0, 0
    while count <= MOST_SCANS and (found := _MARKER.search(data, at)) is not None:
        (marker,), at = found[1], found.end()
        if marker == 0xD9:
            break
        if marker == 0xDA:
            count += 1
        if marker not in _ALONE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return count


def num_pages(data: bytes) -> int:
    """Directories in a TIFF's chain up to its end or to where it is no TIFF, MOST_PAGES + 1 at most; a chain that is a
    circle is libtiff's to notice."""
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
    except (struct.error, OverflowError):  # Beyond the end.
        pass
    return count
