"""BMP: the same pixels as the same image in PNG, and the limits of its header."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageDecodeError, ImageTooLargeError, UnsupportedImageError
from kestrel_engine.preprocess.decoding.bmp import BmpImage
from kestrel_engine.preprocess.decoding.open_image import OnBackground, open_image
from tests.engine.preprocess.encoded import encoded

LIMITS = ImageLimits()
RNG = np.random.default_rng(7)
COLOURS = Image.fromarray(RNG.integers(0, 256, (150, 67, 3), dtype=np.uint8))


def bmp(image: Image.Image) -> bytes:
    return encoded(image, "BMP")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_the_pixels_are_those_of_the_image(mode: str) -> None:
    image = COLOURS.convert(mode)
    pixels = open_image(bmp(image), LIMITS).pixels
    assert pixels.flags.c_contiguous and np.array_equal(pixels, np.asarray(image.convert("RGB")))


def test_rows_from_top_to_bottom() -> None:
    data = bytearray(bmp(COLOURS))
    height = struct.unpack_from("<i", data, 22)[0]
    struct.pack_into("<i", data, 22, -height)
    assert np.array_equal(open_image(bytes(data), LIMITS).pixels, np.asarray(COLOURS)[::-1])


def test_alpha_is_dropped_or_composited() -> None:
    rgba = COLOURS.convert("RGBA")
    rgba.putalpha(Image.fromarray(RNG.integers(0, 256, (150, 67), dtype=np.uint8)))
    header = struct.pack("<IiiHHIIiiII", 108, 67, -150, 1, 32, 3, 0, 0, 0, 0, 0)
    masks = struct.pack("<4I", 0xFF, 0xFF00, 0xFF0000, 0xFF000000) + bytes(52)
    body = rgba.tobytes()
    offset = 14 + len(header) + len(masks)
    data = b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset) + header + masks + body
    assert np.array_equal(open_image(data, LIMITS).pixels, np.asarray(COLOURS))
    white = open_image(OnBackground(data, (255, 255, 255)), LIMITS).pixels
    alpha = np.asarray(rgba)[:, :, 3:] / 255
    assert np.abs(white - (np.asarray(COLOURS) * alpha + 255 * (1 - alpha))).max() <= 0.51


def test_limits_hold_before_a_pixel_is_decoded() -> None:
    data = bytearray(bmp(COLOURS))
    struct.pack_into("<ii", data, 18, 100_000, 100_000)
    with pytest.raises(ImageTooLargeError, match="100000x100000 = 10000000000 pixels"):
        BmpImage(bytes(data), LIMITS)
    with pytest.raises(ImageTooLargeError, match="limit is 999"):
        BmpImage(bmp(COLOURS), replace(LIMITS, max_pixels=999))


def test_a_short_file_is_broken_before_memory_is_taken() -> None:
    data = bytearray(bmp(COLOURS))
    struct.pack_into("<ii", data, 18, 5000, 5000)
    for broken in (bytes(data), bmp(COLOURS)[:-1], b"BM", b"BM" + bytes(60)):
        with pytest.raises(ImageDecodeError, match="broken or truncated BMP"):
            BmpImage(broken, LIMITS)


def test_compression_is_refused() -> None:
    data = bytearray(bmp(COLOURS.convert("P")))
    struct.pack_into("<I", data, 30, 1)  # RLE8
    with pytest.raises(UnsupportedImageError, match="compressed BMP"):
        BmpImage(bytes(data), LIMITS)
    struct.pack_into("<I", data, 30, 4)  # a JPEG inside
    with pytest.raises(UnsupportedImageError, match=r"Unsupported BMP compression \(4\)"):
        BmpImage(bytes(data), LIMITS)
