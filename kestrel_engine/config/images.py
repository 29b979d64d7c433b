"""ImageLimits: the limits on an image. They are checked on its header, before any pixel is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import REQUESTS
from .setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on an image. They are checked on its header, before any pixel is decoded."""

    max_bytes: int = setting(
        32 * 1024 * 1024,
        REQUESTS,
        "limit on the bytes of an encoded image",
        kind="bytes",
        flag="--max-image-bytes",
        metavar="SIZE",
        low=1,
    )
    """32 MiB holds a 24 megapixel PNG."""
    max_pixels: int = setting(
        100_000_000,
        REQUESTS,
        "limit on the pixels of an image, width times height",
        kind="whole",
        flag="--max-image-pixels",
        metavar="N",
        low=1,
    )
    """The largest common cameras have 100 megapixels."""
    max_aspect_ratio: float = setting(
        20.0,
        REQUESTS,
        "limit on the longer side of an image divided by its shorter side",
        kind="number",
        flag="--max-image-aspect-ratio",
        metavar="RATIO",
        low=1,
    )
    """Beyond this ratio, the resize to crops makes objects too small to see."""
    max_progressive_pixels: int = setting(
        64_000_000,
        REQUESTS,
        "limit on the pixels of a progressive JPEG, whose decoder holds all coefficients in memory",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_interlaced_pixels: int = setting(
        64_000_000,
        REQUESTS,
        "limit on the pixels of an interlaced PNG, which is decoded as a whole",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_webp_pixels: int = setting(
        40_000_000,
        REQUESTS,
        "limit on the pixels of a WebP, which is decoded as a whole",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_avif_pixels: int = setting(
        24_000_000,
        REQUESTS,
        "limit on the pixels of an AVIF, the most expensive format in time and memory",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_heic_pixels: int = setting(
        24_000_000,
        REQUESTS,
        "limit on the pixels of a HEIC, which is as expensive as an AVIF",
        kind="whole",
        metavar="N",
        low=1,
    )
    """The limit of a format is lower than ``max_pixels`` if its pixels cost more (preprocess/decoding/costs.py)."""

    def __post_init__(self) -> None:
        check_settings(self, "image_limits.")
