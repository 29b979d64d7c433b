"""The cost of decoding: bytes and processor time by format. Owns the table and the rule which pixel limit applies.

The table has the figures of the most expensive of several images (noise and one colour, turned and not), rounded up.
``KESTREL_COST_SIDE=3000 pytest -s -m slow tests/engine/preprocess/decoding/test_costs.py`` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...config.image_limits import ImageLimits
from ...config.setting import settings_of
from ...errors import ImageDecodeError, ImageTooLargeError

FIELD = ("image",)
"""The request's field that errors name."""


class Cost(NamedTuple):
    """The resources that one image may need: ``pixels``, ``num_bytes`` of memory, ``seconds`` of one processor."""

    pixels: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Kind:
    """Formats with the same costs of decoding. ``bytes_per_pixel``: memory at the peak, as the kernel limits it, with 3
    for the decoded pixels. ``ns_per_pixel`` and ``ns_per_byte`` (of the encoded image): time of one processor until the
    crops are made; ``ns_per_scan``: for a pixel in each scan. ``share``: of the limit on pixels, for formats that are
    decoded as a whole or cost the most."""

    name: str
    bytes_per_pixel: float
    ns_per_pixel: float
    ns_per_byte: float
    ns_per_scan: float = 0.0
    share: float = 1

    def most_pixels(self, limits: ImageLimits) -> int:
        """The limit on pixels. A lower limit than the default leaves formats their share of the default."""
        most = max(limits.max_pixels, ImageLimits().max_pixels)
        return min(limits.max_pixels, round(self.share * most))


PIXELS = Kind("pixels", 6, 40, 0)
"""Decoded pixels that a caller in this process gave."""

KINDS = {
    kind.name: kind
    for kind in (
        Kind("JPEG", 4.5, 35, 40),
        Kind("progressive JPEG", 10.5, 60, 40, 0.5, share=0.64),
        Kind("PNG", 4, 45, 10),
        Kind("interlaced PNG", 7, 80, 10, share=0.64),
        Kind("WebP", 20, 90, 100, share=0.4),
        Kind("AVIF", 23, 90, 200, share=0.24),
        Kind("HEIC", 23, 90, 200, share=0.24),
        Kind("GIF", 9, 50, 40),
        Kind("TIFF", 8, 50, 20),
        Kind("BMP", 8, 45, 2),
    )
}

_BASE_BYTES = 16 * 2**20
"""Bytes for any image: the crops, and memory that libraries keep."""

_BASE_SECONDS = 0.02
"""Seconds for any image: the size of the crops does not depend on the image's size."""

TURNED_BYTES_PER_PIXEL = 3
"""Additional bytes for an image that its EXIF orientation turns: the image is decoded first, and then turned."""


def cost_of(
    kind: Kind,
    width: int,
    height: int,
    encoded_bytes: int,
    *,
    scans: int = 1,
    pixel_bytes: int = 3,
    turned: bool = False,
) -> Cost:
    """Returns the cost of one image. ``pixel_bytes``: bytes of a stored pixel, all channels; the table is for 3.
    ``scans``: the number of scans of a JPEG."""
    pixels = width * height
    each = kind.bytes_per_pixel * max(1.0, pixel_bytes / 3) + TURNED_BYTES_PER_PIXEL * turned
    time_ns = pixels * (kind.ns_per_pixel * max(1.0, pixel_bytes / 3) + kind.ns_per_scan * scans)
    return Cost(
        pixels=pixels,
        num_bytes=_BASE_BYTES + 2 * encoded_bytes + int(pixels * each),
        seconds=_BASE_SECONDS + 1e-9 * (time_ns + encoded_bytes * kind.ns_per_byte),
    )


def check_pixels(kind: Kind, width: int, height: int, limits: ImageLimits) -> None:
    """Raises ImageTooLargeError if an image of ``width`` x ``height`` has more pixels than its format's limit."""
    pixels, limit = width * height, kind.most_pixels(limits)
    if pixels > limit:
        flag = settings_of(ImageLimits)["max_pixels"].flag
        whose = "" if limit == limits.max_pixels else f" for {kind.name}"
        part = f"{kind.share:g} of {flag}" if whose else flag
        raise ImageTooLargeError(
            FIELD,
            f"has {width}x{height} = {pixels} pixels, the limit{whose} is {limit} ({part})",
            value=pixels,
            limit=limit,
        )


def check_size(width: int, height: int, limits: ImageLimits, kind: Kind) -> None:
    """Raises ImageDecodeError for an empty image, and ImageTooLargeError for one beyond the limits."""
    if width < 1 or height < 1:
        raise ImageDecodeError(FIELD, f"is empty: {width}x{height} pixels")
    check_pixels(kind, width, height, limits)
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_aspect_ratio:
        raise ImageTooLargeError(
            FIELD,
            f"of {width}x{height} has sides of {ratio:.4g}:1, the limit is {limits.max_aspect_ratio:g}:1",
            value=ratio,
            limit=limits.max_aspect_ratio,
        )
