"""What is sent for each form of image, and what is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel_client import InvalidImageError, RequestTooLargeError
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client.images.image_forms import to_image, to_pillow

LIMIT = 64 * 1024 * 1024
RGB = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def pixels(message: common_pb2.Image) -> np.ndarray:
    raw = message.raw
    return np.frombuffer(raw.data, np.uint8).reshape(raw.height, raw.width, -1)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_go_out_as_they_are(kind: Any) -> None:
    assert to_image(kind(b"any file"), LIMIT).encoded == b"any file"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_goes_out_as_it_is(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.jpg"
    file.write_bytes(b"any file")
    assert to_image(kind(file), LIMIT).encoded == b"any file"


@pytest.mark.parametrize(
    ("array", "format"),
    [
        (RGB, common_pb2.PIXEL_FORMAT_RGB8),
        (RGB[:, ::-1], common_pb2.PIXEL_FORMAT_RGB8),  # not contiguous
        (np.dstack([RGB, RGB[..., 0]]), common_pb2.PIXEL_FORMAT_RGBA8),
        (RGB[..., :1], common_pb2.PIXEL_FORMAT_GRAY8),
        (RGB[..., 0], common_pb2.PIXEL_FORMAT_GRAY8),
    ],
)
def test_arrays_go_out_as_raw_pixels(array: np.ndarray, format: int) -> None:
    message = to_image(array, LIMIT)
    assert message.raw.format == format
    assert (message.raw.width, message.raw.height) == (3, 2)
    assert (pixels(message) == array.reshape(2, 3, -1)).all()


@pytest.mark.parametrize(
    ("mode", "format", "channels"),
    [
        ("RGB", common_pb2.PIXEL_FORMAT_RGB8, 3),
        ("RGBA", common_pb2.PIXEL_FORMAT_RGBA8, 4),
        ("L", common_pb2.PIXEL_FORMAT_GRAY8, 1),
        ("P", common_pb2.PIXEL_FORMAT_RGB8, 3),
        ("1", common_pb2.PIXEL_FORMAT_RGB8, 3),
        ("LA", common_pb2.PIXEL_FORMAT_RGBA8, 4),
        ("CMYK", common_pb2.PIXEL_FORMAT_RGB8, 3),
    ],
)
def test_pillow_images_go_out_as_raw_pixels(mode: str, format: int, channels: int) -> None:
    image = Image.fromarray(RGB).convert(mode)
    message = to_image(image, LIMIT)
    assert message.raw.format == format
    wanted = {1: image, 3: image.convert("RGB"), 4: image.convert("RGBA")}[channels]
    assert (pixels(message).squeeze() == np.asarray(wanted)).all()


def test_pillow_images_stand_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    lying = Image.open(io.BytesIO(encoded(Image.fromarray(RGB), "PNG", exif=exif)))
    message = to_image(lying, LIMIT)
    assert (message.raw.width, message.raw.height) == (2, 3)
    assert (pixels(message) == np.rot90(RGB, -1)).all()
    for source in (lying, encoded(Image.fromarray(RGB), "PNG", exif=exif)):
        assert (np.asarray(to_pillow(source)) == np.rot90(RGB, -1)).all()


def test_sixteen_bits_are_left_to_the_server() -> None:
    deep = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))
    sent = Image.open(io.BytesIO(to_image(deep, LIMIT).encoded))
    assert (np.asarray(sent) == np.asarray(deep)).all()
    assert np.asarray(to_pillow(deep))[0, :, 0].tolist() == [0, 1, 255]


def test_a_device_without_end_is_too_large() -> None:
    with pytest.raises(RequestTooLargeError, match="max_message_bytes=1000"):
        to_image("/dev/zero", 1000)


def test_what_is_too_large_raw_goes_out_as_png() -> None:
    flat = np.full((400, 400, 3), 7, np.uint8)
    for image in (flat, Image.fromarray(flat)):
        message = to_image(image, 200_000)
        assert message.WhichOneof("source") == "encoded" and len(message.encoded) < 200_000
        assert (np.asarray(Image.open(io.BytesIO(message.encoded))) == flat).all()


def test_noise_that_fits_nowhere_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    for image in (noise, Image.fromarray(noise)):
        with pytest.raises(RequestTooLargeError, match="max_message_bytes=200000"):
            to_image(image, 200_000)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (
            None,
            "a path, .*bytes, an open file, a uint8 array, a Pillow image, ImageFeatures or an ImageHandle",
        ),
        (7, "not int"),
        (b"", "has 0 bytes"),
        (RGB.astype(np.float32), r"not float32 of shape \[2, 3, 3\]"),
        (RGB.reshape(3, 6, 1)[None], "must be uint8 of shape"),
        (RGB[..., :2], "must be uint8 of shape"),
        (RGB[:0], "empty"),
        ("/nowhere/picture.png", "can't read /nowhere/picture.png: No such file"),
        ("/", "can't read"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, words: str) -> None:
    with pytest.raises(InvalidImageError, match=words):
        to_image(image, LIMIT)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(InvalidImageError, match="is empty"):
        to_image(tmp_path / "empty.png", LIMIT)


def test_to_pillow_leaves_the_input_alone() -> None:
    image = Image.fromarray(RGB)
    copy = to_pillow(image)
    copy.putpixel((0, 0), (9, 9, 9))
    assert image.getpixel((0, 0)) == (0, 1, 2)
    assert (np.asarray(to_pillow(RGB)) == RGB).all()


def test_a_broken_file_cannot_be_drawn_on() -> None:
    with pytest.raises(InvalidImageError, match="Pillow can't read"):
        to_pillow(b"no picture")
