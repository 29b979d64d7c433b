"""PlainJpeg: a JPEG that libjpeg-turbo (simplejpeg) opens and decodes without libvips, in half the time.

A JPEG is plain if it is baseline, with 8 bits, grey or of three components that one scan holds, upright, and without
Adobe's marker. The pixels are those of libvips' loader. Without simplejpeg, no JPEG is plain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np

from ...config.image_limits import ImageLimits
from .costs import KINDS, Cost, check_size, cost_of
from .decoded_image import Allocate, DecodedImage, new_bytes

try:
    import simplejpeg
except ImportError:  # There are no wheels for some systems.
    simplejpeg = None

AVAILABLE = simplejpeg is not None
KIND = KINDS["JPEG"]

_BASELINE = (0xC0, 0xC1)
_SCAN = 0xDA
_WITHOUT_EFFECT = frozenset({0xE0, *range(0xE2, 0xEE), 0xEF, 0xFE})
"""Application data and comments that do not change the pixels. Adobe's marker (0xEE) may change the meaning of the
components."""
_EXIF_OR_XMP = 0xE1
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION, _SHORT, _UPRIGHT = 0x0112, 3, 1
_TABLES = frozenset({0xC4, 0xDB, 0xDD})
"""Huffman tables, quantisation tables, and the restart interval."""
_MOST_SEGMENTS = 256
"""An ICC profile of 16 MB has this many segments. A file may have more, but reading them takes time."""


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Returns (width, height) if ``data`` begins as a plain JPEG, and None for anything else. Never raises."""
    if not AVAILABLE or data[:2] != b"\xff\xd8":
        return None
    size, components, at = None, 0, 2
    for _ in range(_MOST_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        segment = data[at + 4 : at + 2 + length]
        if length < 2 or len(segment) != length - 2:
            return None
        if marker in _BASELINE:
            if size is not None or length < 8 or segment[0] != 8 or segment[5] not in (1, 3):
                return None
            height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
            size, components = (width, height), segment[5]
        elif marker == _SCAN:
            # Such a scan holds the whole image. After it, libjpeg-turbo refuses further scans.
            return size if length > 2 and segment[0] == components else None
        elif marker == _EXIF_OR_XMP:
            if not segment.startswith(_XMP) and not _is_upright(segment):
                return None
        elif marker not in _TABLES and marker not in _WITHOUT_EFFECT:
            return None
        at += 2 + length
    return None


def _is_upright(segment: bytes) -> bool:
    """Whether this is well-formed EXIF data whose first directory has no orientation, or the usual one."""
    tiff = segment[len(_EXIF) :]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if not segment.startswith(_EXIF) or order is None or len(tiff) < 10:
        return False
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    if at < 8 or at + 2 > len(tiff):
        return False
    (count,) = struct.unpack_from(order + "H", tiff, at)
    entries = tiff[at + 2 : at + 2 + 12 * count]
    if len(entries) != 12 * count:
        return False
    for tag, kind, number, value in struct.iter_unpack(order + "HHIH2x", entries):
        if tag == _ORIENTATION and (kind, number, value) != (_SHORT, 1, _UPRIGHT):
            return False
    return True


class PlainJpeg:
    """A plain JPEG whose header is read and checked. ``cost``: the resources that decoding may take."""

    def __init__(
        self,
        data: bytes,
        size: tuple[int, int],
        limits: ImageLimits,
        background: tuple[int, int, int] | None,
        otherwise: Callable[[np.ndarray], Iterator[int]],
    ) -> None:
        """``size``: of `plain_size`. ``background``: only a part of the image's identity. ``otherwise``: decodes data
        that libjpeg-turbo finds damaged, or raises. Raises ImageTooLargeError and ImageDecodeError.
        """
        width, height = size
        check_size(width, height, limits, KIND)
        self._data, self._shape, self._background = data, (height, width, 3), background
        self._otherwise = otherwise
        self.cost: Cost = cost_of(KIND, width, height, len(data))

    @property
    def upright_size(self) -> tuple[int, int]:
        height, width, _ = self._shape
        return width, height

    def begin(self, allocate: Allocate = new_bytes) -> DecodedImage:
        """The pixels in memory of ``allocate``, still to be decoded."""
        pixels = allocate(self._shape)
        identity = (self._data, bytes(self._background or ()))
        return DecodedImage(pixels, decoding(self._data, pixels, self._otherwise), identity)


def decoding(
    data: bytes, pixels: np.ndarray, otherwise: Callable[[np.ndarray], Iterator[int]]
) -> Iterator[int]:
    """Decodes a JPEG into ``pixels`` at once, or by ``otherwise`` if libjpeg-turbo finds damage."""
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, strict=True)
    except ValueError:
        decoded = None
    if decoded is None or decoded.shape != pixels.shape:
        yield from otherwise(pixels)
    else:
        yield len(pixels)
