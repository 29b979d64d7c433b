"""Valid images that can't be decoded are called unsupported, with what they are; damaged ones are called broken."""

import base64
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageDecodeError, UnsupportedImageError
from kestrel_engine.preprocess.decoding.open_image import open_image
from tests.engine.preprocess.encoded import encoded

RED = (200, 30, 40)
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5a"
    "YVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//"
    "yQARCAAQABADAREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AEfN/S/coP/Z"
)
LOSSLESS = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/8MAEQgAEAAQA1IRAEcRAEIRAP/EABUAAQEAAAAAAAAAAAAAAAAAAAAH/9oADANSAEcAQgABAACkR2TgAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAD/2Q=="
)
TWELVE_BITS = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1x"
    "eXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wQAR"
    "DAAIAAgDASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAr/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFAEBAAAAAAAAAAAAAAAAAAAA"
    "AP/EABQRAQAAAAAAAAAAAAAAAAAAAAD/2gAMAwEAAhEDEQA/AJjwAf/Z"
)
JPEG_LS = base64.b64decode(
    "/9j/6AAgU1BJRkYAAgAAAwAAABAAAAAQCggGAQAAASwAAAEs/+gACAAAAAH/2P/3ABEIABAAEAMBEQACEQADEQD/2gAMAwEAAgADAAACAAAA"
    "AW54YSv/f/9//3K//3/+/9k="
)


def with_frame(marker: int, bits: int = 8) -> bytes:
    data = encoded(Image.new("RGB", (16, 16), RED), "JPEG")
    return data.replace(b"\xff\xc0\0\x11\x08", bytes([0xFF, marker, 0, 0x11, bits]))


def apples_png() -> bytes:
    body = b"CgBI" + bytes(4)
    chunk = struct.pack(">I", 4) + body + struct.pack(">I", zlib.crc32(body))
    png = encoded(Image.new("RGB", (16, 16), RED))
    return png[:8] + chunk + png[8:]


UNSUPPORTED = {
    "JPEG of 12 bits": TWELVE_BITS,
    "JPEG of 12 bits a": with_frame(0xC2, 12),
    "JPEG of 16 bits": with_frame(0xC3, 16),
    "JPEG of the kind JPEG-LS": JPEG_LS,
    "JPEG of the kind hierarchical": with_frame(0xC5),
    "JPEG of the kind arithmetic lossless": with_frame(0xCB),
    r"PNG .*\(CgBI\)": apples_png(),
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_the_reason_says_what_it_is(words):
    with pytest.raises(UnsupportedImageError, match=f"is a {words}.*can't be decoded; save it as"):
        open_image(UNSUPPORTED[words], ImageLimits())


@pytest.mark.parametrize("data", [ARITHMETIC, LOSSLESS], ids=["arithmetic", "lossless"])
def test_rare_jpegs_are_decoded_and_broken_if_truncated(data):
    pixels = open_image(data, ImageLimits()).pixels.astype(int)
    assert np.abs(pixels - RED).max() <= 6
    for end in (len(data) // 2, len(data) // 4, 30):
        with pytest.raises(ImageDecodeError, match="is broken or truncated JPEG"):
            open_image(data[:end], ImageLimits())
