"""ImageLimits: the limits on an image. They are checked on its header, before any pixel is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import REQUESTS
from .setting import check_settings, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    max_bytes: int = REQUESTS.setting(
        32 * 1024 * 1024, "limit on the bytes of an encoded image", flag="--max-image-bytes", low=1
    )
    """32 MiB holds a 24 megapixel PNG."""
    max_pixels: int = REQUESTS.setting(
        100_000_000,
        "limit on pixels of an image; the limit of progressive JPEG and interlaced PNG is 0.64 times this, of WebP 0.4 "
        "times, of AVIF and HEIC 0.24 times",
        flag="--max-image-pixels",
        low=1,
    )
    """The largest common cameras have 100 megapixels. preprocess/decoding/costs.py has the shares of formats."""
    max_aspect_ratio: float = checked(20.0, low=1)
    """Limit on the longer side of an image divided by its shorter side. Beyond this ratio, the resize to crops makes
    objects too small to see."""

    def __post_init__(self) -> None:
        check_settings(self, "image_limits.")
