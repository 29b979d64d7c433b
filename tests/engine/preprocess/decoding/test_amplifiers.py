"""Small files that would keep a reader busy: refused before they are read."""

import struct
import time

import numpy as np
import pytest
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageError, ImageTooLargeError
from kestrel_engine.preprocess.decoding.amplifiers import (
    MOST_PAGES,
    MOST_SCANS,
    num_pages,
    num_scans,
)
from kestrel_engine.preprocess.decoding.open_image import open_image
from tests.engine.preprocess.encoded import encoded

LIMITS = ImageLimits()
IMAGE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def jpeg(**options) -> bytes:
    return encoded(IMAGE, "JPEG", **options)


def rescanned(times: int) -> bytes:
    """A progressive JPEG with an empty scan of nothing but zeros, time and again: twelve bytes each."""
    data = encoded(Image.new("RGB", (64, 48), (128, 128, 128)), "JPEG", progressive=True)
    begin = data.index(b"\xff\xda\x00\x08\x01\x01\x00\x06\x3f")
    scan = bytearray(data[begin : data.index(b"\xff", begin + 2)])
    # No successive approximation: it may be repeated, and libjpeg has nothing to warn of.
    scan[9] = 0
    return data[:-2] + bytes(scan) * times + b"\xff\xd9"


def tiff(pages: int, order: str = "<", *, big: bool = False) -> bytes:
    """``pages`` directories about the same 8 x 8 grey pixels."""
    tags = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 273: 16, 277: 1, 278: 8, 279: 64}
    offset, count, entry = ("Q", "Q", "HHQQ") if big else ("I", "H", "HHII")
    start, kind = 16 + 64, 16 if big else 4
    size = struct.calcsize("<" + count + offset) + len(tags) * struct.calcsize("<" + entry)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head += struct.pack(order + "HH", 8, 0) if big else b""
    out = bytearray((head + struct.pack(order + offset, start)).ljust(start, b"\x50"))
    for page in range(pages):
        out += struct.pack(order + count, len(tags))
        for tag, value in tags.items():
            out += struct.pack(order + entry, tag, kind, 1, value)
        out += struct.pack(order + offset, start + size * (page + 1) if page + 1 < pages else 0)
    return bytes(out)


def test_scans_are_counted_up_to_the_end_of_the_image():
    assert num_scans(jpeg()) == 1
    assert num_scans(jpeg(restart_marker_blocks=1)) == 1
    assert num_scans(jpeg(progressive=True)) == 10
    assert num_scans(rescanned(3)) == 13
    assert num_scans(rescanned(10**5)) == MOST_SCANS + 1
    comment = jpeg(comment=b"\xff\xda" * 500)
    assert num_scans(comment + b"\xff\xda" * 500) == 1
    assert open_image(comment + b"\xff\xda" * 500, LIMITS).width == 64
    for broken in (b"", b"\xff", b"\xff\xda", b"\xff\xd8\xff", b"\xff\xe0\x00\x00" * 9):
        assert num_scans(broken) <= 1


def test_as_many_scans_as_any_encoder_writes_are_taken():
    assert open_image(rescanned(MOST_SCANS - 10), LIMITS).width == 64


def test_a_jpeg_of_many_scans_is_refused_at_once():
    data = rescanned(200_000)
    began = time.process_time()
    with pytest.raises(ImageTooLargeError, match="a JPEG that has more than 100 scans"):
        open_image(data, LIMITS)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
def test_pages_are_counted(order, big):
    for pages in (1, 3, 500):
        data = tiff(pages, order, big=big)
        assert num_pages(data) == pages
        assert open_image(data, LIMITS).pixels.shape == (8, 8, 3)
    data = tiff(MOST_PAGES + 5, order, big=big)
    assert num_pages(data) == MOST_PAGES + 1
    with pytest.raises(ImageTooLargeError, match="a TIFF that has more than 10000 pages"):
        open_image(data, LIMITS)


@pytest.mark.parametrize("big", [False, True])
def test_chains_that_lead_nowhere(big):
    """Circles, offsets beyond the end and beyond all numbers: something is said of each, soon."""
    whole = tiff(2, big=big)
    width = 8 if big else 4
    for to in (0, 80, 81, len(whole), 2**31, 256**width - 1):
        data = whole[:-width] + to.to_bytes(width, "little")
        assert num_pages(data) <= MOST_PAGES + 1
        began = time.process_time()
        try:
            open_image(data, LIMITS)
        except ImageError:
            pass
        assert time.process_time() - began < 0.5
    for length in range(len(whole)):
        assert num_pages(whole[:length]) <= 2
