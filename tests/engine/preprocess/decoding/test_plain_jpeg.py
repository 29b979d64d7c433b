"""Plain JPEGs: their headers are read as libvips reads them, and damaged ones have the outcome that libvips gives."""

import numpy as np
import pytest
import pyvips
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import RequestError
from kestrel_engine.preprocess.decoding import plain_jpeg
from kestrel_engine.preprocess.decoding.open_image import open_image, read_header
from kestrel_engine.preprocess.decoding.plain_jpeg import PlainJpeg, plain_size
from tests.engine.preprocess.encoded import encoded

LIMITS = ImageLimits()


def jpeg(width: int = 40, height: int = 24, mode: str = "RGB", **options) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Image.fromarray(pixels).convert(mode), "JPEG", **options)


def with_exif(orientation: int | None) -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    if orientation is not None:
        exif[0x0112] = orientation
    return jpeg(exif=exif)


def by_libvips() -> bytes:
    """libvips adds EXIF data."""
    return pyvips.Image.new_from_array(np.full((20, 30, 3), 7, np.uint8)).jpegsave_buffer()


def outcome(data: bytes) -> object:
    try:
        image = open_image(data, LIMITS)
    except RequestError:  # With several faults, each reader may name another one.
        return "refused"
    return image.pixels.shape, image.pixels.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        jpeg(),
        jpeg(1, 1),
        jpeg(257, 31, quality=30, subsampling=2),
        jpeg(mode="L"),
        jpeg(comment="hello", dpi=(72, 72)),
        jpeg(icc_profile=b"x" * 200_000),
        jpeg(restart_marker_blocks=2),
        jpeg(xmp=b"<x:xmpmeta/>"),
        with_exif(None),
        with_exif(1),
        by_libvips(),
    ],
)
def test_the_size_is_that_of_libvips(data: bytes) -> None:
    image = pyvips.Image.new_from_buffer(data, "")
    assert plain_size(data) == (image.width, image.height)
    assert isinstance(read_header(data, LIMITS), PlainJpeg)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(progressive=True),
        jpeg(mode="CMYK"),
        with_exif(6),
        with_exif(1).replace(b"Exif\0\0MM\0*", b"Exif\0\0MM\0+"),
        jpeg(exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"),
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xda\x00\x02",
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 1000,
        jpeg()[:100],
        jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),  # 12 bits
    ],
)
def test_others_are_left_to_libvips(data: bytes) -> None:
    assert plain_size(data) is None


def test_two_sizes_are_left_to_libvips() -> None:
    data = jpeg()
    begin = data.index(b"\xff\xc0")
    frame = data[begin : begin + 19]
    assert plain_size(data[:begin] + frame + data[begin:]) is None


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_ones_end_as_with_libvips_alone(count: int, monkeypatch) -> None:
    rng = np.random.default_rng(count)
    whole = [
        jpeg(),
        jpeg(65, 33, subsampling=2, quality=40),
        jpeg(mode="L"),
        with_exif(1),
        with_exif(6),
    ]
    damaged = []
    for number in range(count):
        data = bytearray(whole[number % len(whole)])
        for _ in range(rng.integers(1, 4)):
            # Half of the changes concern the header.
            data[rng.integers(2, 620 if number % 2 else len(data))] = rng.integers(256)
        damaged.append(bytes(data[: rng.integers(20, len(data))] if number % 5 == 0 else data))
    found = [outcome(data) for data in damaged]
    monkeypatch.setattr(plain_jpeg, "AVAILABLE", False)
    for data, seen in zip(damaged, found, strict=True):
        assert seen == outcome(data), data
