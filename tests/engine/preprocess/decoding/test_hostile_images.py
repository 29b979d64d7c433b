"""Broken, oversized and hostile images: a precise error each, nothing decoded in vain, nothing written."""

import gzip
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import pyvips
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import (
    ImageDecodeError,
    ImageError,
    ImageTooLargeError,
    InvalidRequest,
    UnsupportedImageError,
)
from kestrel_engine.preprocess.decoding.costs import KINDS, check_pixels
from kestrel_engine.preprocess.decoding.open_image import IMAGE_FORMATS, open_image
from tests.engine.preprocess.encoded import encoded as of_image

LIMITS = ImageLimits()
IMAGE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 32, 3), dtype=np.uint8))


def encoded(fmt: str, picture: Image.Image = IMAGE, **options) -> bytes:
    return of_image(picture, fmt, **options)


EXIF = Image.Exif()
EXIF[0x0112] = 6
TAKEN = {
    "jpeg": encoded("JPEG"),
    "jpeg-progressive": encoded("JPEG", progressive=True, exif=EXIF),
    "png": encoded("PNG"),
    "png-palette": encoded("PNG", IMAGE.quantize(8), exif=EXIF),
    "webp": encoded("WEBP"),
    "webp-animated": encoded("WEBP", save_all=True, append_images=[IMAGE.rotate(180)]),
    "tiff": encoded("TIFF"),
    "tiff-deflate": encoded("TIFF", compression="tiff_deflate"),
    "gif": encoded("GIF"),
    "avif": encoded("AVIF"),
    "bmp": encoded("BMP"),
}

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><rect width="9" height="9"/></svg>'
REFUSED = {
    "text": b"this is not a picture\n" * 20,
    "html": b"<!DOCTYPE html><html><body><img src='x.png'></body></html>",
    "svg": SVG,
    "svg with declaration": b'<?xml version="1.0" encoding="UTF-8"?>\n<!-- c -->\n' + SVG,
    "svg compressed": gzip.compress(SVG),
    "svg that includes a file": SVG.replace(b"<rect", b'<image href="file:///etc/passwd"/><rect'),
    "pdf": b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "ppm": b"P6 2 2 255\n" + bytes(12),
    "pgm": b"P2 2 2 255\n1 2 3 4\n",
    "pfm": b"PF\n2 2\n-1.0\n" + bytes(48),
    "ico": encoded("ICO"),
    "tga": encoded("TGA"),
    "jpeg 2000": encoded("JPEG2000"),
    "jpeg xl": b"\xff\x0a" + bytes(60),
    "jpeg xl container": b"\x00\x00\x00\x0cJXL \r\n\x87\n" + bytes(60),
    "radiance": b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 2 +X 2\n" + bytes(16),
    "openexr": b"\x76\x2f\x31\x01\x02\x00\x00\x00" + bytes(60),
    "fits": b"SIMPLE  =                    T".ljust(2880),
    "matlab": b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + bytes(60),
    "nifti": struct.pack("<i", 348) + bytes(340) + b"n+1\x00" + bytes(60),
    "libvips' own": b"\x08\xf2\xa6\xb6" + bytes(100),
    "csv": b"1,2,3\n4,5,6\n",
    "image magick": b"push graphic-context\nviewbox 0 0 9 9\nimage over 0,0 0,0 'https://localhost/'\n",
    "mp4": b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom",
    "zip": b"PK\x03\x04" + bytes(60),
    "elf": b"\x7fELF" + bytes(60),
    "zeros": bytes(1000),
    "one byte": b"\xff",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_and_ours_are_named(name, tmp_path):
    with pytest.raises(UnsupportedImageError) as caught:
        open_image(REFUSED[name], LIMITS)
    assert caught.value.field == "image"
    for fmt in IMAGE_FORMATS:
        assert fmt in caught.value.message
    # The name's ending does not help.
    path = tmp_path / "innocent.png"
    path.write_bytes(REFUSED[name])
    with pytest.raises(UnsupportedImageError):
        open_image(path, LIMITS)


def test_libvips_itself_refuses_other_formats():
    """Importing images.py blocks the loaders for the process, so a nested or mistaken load can't reach them either."""
    for data in (SVG, b"1,2,3\n4,5,6\n", REFUSED["libvips' own"]):
        with pytest.raises(pyvips.Error):
            pyvips.Image.new_from_buffer(data, "")
    for operation in ("svgload_buffer", "csvload", "rawload", "vipsload"):
        if pyvips.type_find("VipsForeignLoad", operation):
            argument = SVG if operation.endswith("buffer") else __file__
            extra = (1, 1, 1) if operation == "rawload" else ()
            with pytest.raises(pyvips.Error, match="blocked"):
                pyvips.Operation.call(operation, argument, *extra)


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b"")])
def test_empty_bytes(empty):
    with pytest.raises(ImageDecodeError, match="empty"):
        open_image(empty, LIMITS)


@pytest.mark.parametrize("name", TAKEN)
def test_truncated_images_are_refused(name):
    data = TAKEN[name]
    open_image(data, LIMITS)
    for length in {*range(1, 64), *range(64, len(data) - 64, 37)}:
        with pytest.raises((ImageDecodeError, UnsupportedImageError)) as caught:
            open_image(data[:length], LIMITS)
        if length > 64:
            assert isinstance(caught.value, ImageDecodeError), length
            assert "broken or truncated" in caught.value.message


def test_a_gif_whose_first_frame_is_whole_is_taken():
    data = encoded("GIF", save_all=True, append_images=[IMAGE.rotate(180)])
    assert open_image(data[:-100], LIMITS).width == 32


@pytest.mark.parametrize("name", TAKEN)
def test_trailing_bytes_do_no_harm(name):
    expected = open_image(TAKEN[name], LIMITS).pixels
    assert np.array_equal(open_image(TAKEN[name] + b"<script>" * 9, LIMITS).pixels, expected)


@pytest.mark.parametrize("rounds", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_mutated_images_give_images_or_image_errors(rounds):
    """Bytes flipped, cut out, repeated, spliced: no other exception, no crash, no line break or path in a message."""
    rng = np.random.default_rng(20261120)
    seeds = list(TAKEN.values())
    errors = 0
    for round_ in range(rounds):
        data = bytearray(seeds[round_ % len(seeds)])
        for _ in range(rng.integers(1, 8)):
            at = int(rng.integers(0, len(data)))
            match rng.integers(0, 4):
                case 0:
                    data[at] = int(rng.integers(0, 256))
                case 1:
                    data[at : at + 4] = int(rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF])).to_bytes(
                        4, "big"
                    )
                case 2:
                    del data[at : at + int(rng.integers(1, 16))]
                case 3:
                    data[at:at] = seeds[int(rng.integers(len(seeds)))][:40]
        try:
            image = open_image(bytes(data), ImageLimits(max_pixels=1_000_000))
        except ImageError as error:
            errors += 1
            assert error.field == "image"
            assert "\n" not in str(error) and "/" not in str(error) and len(str(error)) < 300
        else:
            assert image.pixels.dtype == np.uint8 and image.pixels.shape[2] == 3
    assert errors > rounds / 5


# Limits, from the header alone: none of these files holds the pixels that it announces, so a decoder that began before
# the check would fail with another error.


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(TAKEN["jpeg"])
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff(width: int, height: int) -> bytes:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 1}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + directory + bytes(4)


@pytest.mark.parametrize("make", [png, jpeg, tiff])
def test_pixel_limit(make):
    with pytest.raises(ImageTooLargeError) as caught:
        open_image(make(20000, 20000), LIMITS)
    assert caught.value.field == "image"
    for number in ("20000x20000", "400000000", "100000000"):
        assert number in caught.value.message


@pytest.mark.parametrize("make", [png, jpeg, tiff])
@pytest.mark.parametrize("size", [(2100, 100), (100, 2100), (20001, 1000)])
def test_aspect_limit(make, size):
    with pytest.raises(
        ImageTooLargeError, match=r"of \d+x\d+ has sides of 2[01].*the limit is 20:1"
    ):
        open_image(make(*size), LIMITS)


def test_limits_are_inclusive():
    limits = ImageLimits(max_pixels=2000, max_aspect_ratio=20, max_bytes=len(TAKEN["png"]))
    assert open_image(np.zeros((10, 200, 3), np.uint8), limits).width == 200
    assert open_image(TAKEN["png"], limits).width == 32
    with pytest.raises(ImageTooLargeError, match="2010 pixels, the limit is 2000"):
        open_image(np.zeros((30, 67, 3), np.uint8), limits)
    with pytest.raises(ImageTooLargeError, match=r"sides of 20\.1:1, the limit is 20:1"):
        open_image(np.zeros((201, 10), np.uint8), ImageLimits(max_aspect_ratio=20))
    with pytest.raises(
        ImageTooLargeError, match=f"has {len(TAKEN['png']) + 1} bytes, the limit is"
    ):
        open_image(TAKEN["png"] + b"x", limits)


def test_an_expensive_format_has_a_share_of_the_limit():
    most = {name: KINDS[name].most_pixels(LIMITS) for name in ("JPEG", "WebP", "AVIF", "HEIC")}
    assert most == {"JPEG": 100_000_000, "WebP": 40_000_000, "AVIF": 24_000_000, "HEIC": 24_000_000}
    raised, lowered = ImageLimits(max_pixels=200_000_000), ImageLimits(max_pixels=30_000_000)
    assert KINDS["AVIF"].most_pixels(raised) == 48_000_000
    assert KINDS["AVIF"].most_pixels(lowered) == 24_000_000
    assert KINDS["WebP"].most_pixels(lowered) == 30_000_000
    check_pixels(KINDS["AVIF"], 6000, 4000, LIMITS)
    told = r"24006000 pixels, the limit for AVIF is 24000000 \(0.24 of --max-image-pixels\)"
    with pytest.raises(ImageTooLargeError, match=told):
        check_pixels(KINDS["AVIF"], 6000, 4001, LIMITS)


def test_limits_are_settings():
    assert open_image(np.zeros((210, 10), np.uint8), ImageLimits(max_aspect_ratio=21)).height == 210
    for source in (TAKEN["avif"], TAKEN["webp"], TAKEN["gif"], pyvips.Image.black(32, 24)):
        with pytest.raises(ImageTooLargeError, match="768 pixels, the limit is 700"):
            open_image(source, ImageLimits(max_pixels=700))


def test_a_size_at_the_edge_passes_the_check_and_fails_in_decoding():
    with pytest.raises(ImageDecodeError, match="PNG"):
        open_image(png(10000, 10000), LIMITS)


@pytest.mark.parametrize("make", [png, jpeg, tiff])
@pytest.mark.parametrize("size", [(0, 0), (0, 10), (10, 0)])
def test_zero_sizes(make, size):
    with pytest.raises(ImageDecodeError):
        open_image(make(*size), LIMITS)


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 5, 3), (5, 0, 3), (0, 0)])
def test_empty_arrays(shape):
    with pytest.raises(ImageDecodeError, match="empty"):
        open_image(np.zeros(shape, np.uint8), LIMITS)


def test_too_many_channels():
    with pytest.raises(UnsupportedImageError, match="9 channels"):
        open_image(pyvips.Image.black(8, 8, bands=9).tiffsave_buffer(), LIMITS)
    with pytest.raises(UnsupportedImageError, match="complex"):
        open_image(pyvips.Image.black(8, 8).cast("complex"), LIMITS)


def test_unreadable_paths(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, words in [
        (tmp_path / "none.png", "No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("", "No such file"),
        ("a\0b.png", "not a valid path"),
        ("x" * 5000, "too long"),
        ("https://localhost/picture.png", "No such file"),
    ]:
        with pytest.raises(InvalidRequest, match=words) as caught:
            open_image(path, LIMITS)
        assert caught.value.field == "image"
        assert "\n" not in caught.value.message


def test_an_empty_file(tmp_path):
    path = tmp_path / "empty.png"
    path.touch()
    with pytest.raises(ImageDecodeError, match="empty"):
        open_image(path, LIMITS)


NO_DISK = """
import io, sys, tempfile
import numpy as np
from PIL import Image
from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
import pyvips

pixels = np.zeros((900, 1200, 3), np.uint8)
exif = Image.Exif()
exif[0x0112] = 6
for fmt in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "AVIF"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, fmt, exif=exif)
    cut_crops(open_image(buffer.getvalue(), ImageLimits()), VisionConfig())
interlaced = pyvips.Image.new_from_array(pixels).pngsave_buffer(interlace=True)
cut_crops(open_image(interlaced, ImageLimits()), VisionConfig())
assert pyvips.cache_get_size() == 0
try:  # the trap works: random access to a picture needs the disk
    plain = pyvips.Image.new_from_array(pixels).pngsave_buffer()
    pyvips.Image.new_from_buffer(plain, "", access="random").avg()
except pyvips.Error:
    print("nothing written")
"""


def test_no_image_is_written_to_disk(tmp_path):
    """With a threshold of one byte, any temporary file of libvips would go to a folder that isn't there, and fail."""
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "none"),
        "VIPS_TMPDIR": str(tmp_path / "none"),
        "VIPS_DISC_THRESHOLD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", NO_DISK], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing written"
