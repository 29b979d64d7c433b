"""Transparent images on a background, and Pillow images and open files as sources."""

import io

import numpy as np
import pytest
from PIL import Image

from kestrel_engine import InvalidRequest
from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.decoding.open_image import OnBackground, open_image
from kestrel_engine.preprocess.prepared_cache import source_digest, source_key
from tests.engine.preprocess.encoded import encoded

LIMITS = ImageLimits()
RGBA = np.array([[[255, 0, 0, 255], [9, 8, 7, 0], [0, 100, 200, 128]]], np.uint8)
WHITE = (255, 255, 255)


def pixels(source):
    return open_image(source, LIMITS).pixels


@pytest.mark.parametrize(
    "source",
    [
        RGBA,
        encoded(RGBA),
        Image.fromarray(RGBA),
        encoded(RGBA, format="WEBP", lossless=True, exact=True),
    ],
    ids=["array", "PNG", "Pillow", "WebP"],
)
def test_alpha_is_dropped_or_laid_on_a_colour(source):
    assert pixels(source).tolist() == [[[255, 0, 0], [9, 8, 7], [0, 100, 200]]]
    laid = pixels(OnBackground(source, WHITE)).astype(int)
    # 128/255 of the last pixel's colour, the rest of white.
    assert np.abs(laid - [[[255, 0, 0], [255, 255, 255], [127, 177, 227]]]).max() <= 1


@pytest.mark.parametrize("colour", [WHITE, (0, 0, 0), (13, 200, 91)])
def test_the_blend_is_rounded_the_same_for_every_source(colour):
    """Each alpha with each colour of a channel, against whole numbers. No value lies between two of them."""
    alpha, value = np.mgrid[0:256, 0:256]
    rgba = np.stack([value, value, value, alpha], axis=2).astype(np.uint8)
    mixed = value[..., None] * alpha[..., None] + np.array(colour) * (255 - alpha[..., None])
    expected = (2 * mixed + 255) // 510
    encodings = [encoded(rgba), encoded(rgba, format="WEBP", lossless=True, exact=True)]
    for source in (rgba, Image.fromarray(rgba), *encodings, encoded(rgba, format="TIFF")):
        assert np.array_equal(pixels(OnBackground(source, colour)), expected)
    grey = encoded(Image.fromarray(rgba).convert("LA"))
    assert np.array_equal(pixels(OnBackground(grey, colour)), expected)


def test_grey_with_alpha_and_what_has_none():
    image = Image.new("LA", (2, 1))
    image.putdata([(50, 0), (50, 255)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    assert pixels(OnBackground(buffer.getvalue(), (1, 2, 3))).tolist() == [
        [[1, 2, 3], [50, 50, 50]]
    ]
    opaque = encoded(RGBA[:, :, :3])
    assert (pixels(OnBackground(opaque, WHITE)) == RGBA[:, :, :3]).all()
    deep = Image.fromarray(np.array([[0, 65535]], np.uint16))
    assert pixels(OnBackground(deep, WHITE))[0, :, 0].tolist() == [0, 255]


def test_backgrounds_are_told_apart_in_the_cache():
    data = encoded(RGBA)
    digest = source_digest(data)
    assert source_digest(OnBackground(data, WHITE)) == digest
    keys = {source_key(digest, background=colour) for colour in (None, WHITE, (0, 0, 0))}
    assert len(keys) == 3


def test_open_files_and_pillow_images_stand_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    lying = encoded(rgb, exif=exif)
    upright = np.rot90(rgb, -1)
    for source in (lying, io.BytesIO(lying), Image.open(io.BytesIO(lying))):
        assert (pixels(source) == upright).all()
    with pytest.raises(InvalidRequest, match="text mode"):
        pixels(io.StringIO("x"))
    with pytest.raises(InvalidRequest, match=r"an open file, .* not dict"):
        pixels({})
