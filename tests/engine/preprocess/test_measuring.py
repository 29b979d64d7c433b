"""The size and crops of an image from its header alone: those of the decoded image, without its decoding."""

import asyncio
import io
import itertools
from typing import Any

import numpy as np
import pytest
import pyvips
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageTooLargeError, InvalidRequest, UnsupportedImageError
from kestrel_engine.preprocess.decoding.costs import Cost
from kestrel_engine.preprocess.decoding.open_image import IMAGE_FORMATS
from kestrel_engine.preprocess.jobs import HeaderSize, ImageJob
from kestrel_engine.preprocess.looks import InCrops, InRegion, Tiled, Tiles
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.preprocess.processes.answers import Answers
from kestrel_engine.types.model_config import VisionConfig

LIMITS, VISION = ImageLimits(), VisionConfig()
_SAVERS = {"JPEG": ".jpg", "PNG": ".png", "WebP": ".webp", "TIFF": ".tif", "GIF": ".gif"}


@pytest.fixture
def pool():
    made = PreprocessPool(1, LIMITS, VISION)
    yield made
    made.close()


def encoded(kind: str, width: int, height: int, orientation: int = 1) -> bytes:
    pixels = (np.add.outer(np.arange(height), np.arange(3 * width)) & 0xC0).astype(np.uint8)
    pixels = pixels.reshape(height, width, 3)
    if kind in _SAVERS:
        image = pyvips.Image.new_from_array(pixels).copy()
        image.set_type(pyvips.GValue.gint_type, "orientation", orientation)
        return bytes(image.write_to_buffer(_SAVERS[kind]))
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, kind, **({"exif": exif} if kind == "AVIF" else {}))
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [("GIF", 1), ("BMP", 1), *itertools.product(("JPEG", "PNG", "WebP", "TIFF", "AVIF"), (1, 6))],
)
async def test_size_and_crops_are_those_of_the_decoded_image(pool, kind, orientation):
    if kind == "AVIF" and "AVIF" not in IMAGE_FORMATS:
        pytest.skip("this installation reads no AVIF")
    small, large = encoded(kind, 40, 30, orientation), encoded(kind, 500, 400, orientation)
    part, tiles = (0.1, 0.2, 0.9, 0.8), Tiles(rows=1, columns=2)
    sources = (small, large, InCrops(large, 2), Tiled(InRegion(large, part), tiles))
    for source in sources:
        found = await pool.measure(source)
        looks = (await pool.prepare(source)).looks
        assert found.size == looks[0].image_size
        assert found.crops == tuple(look.num_distinct for look in looks)


async def test_other_sources(pool):
    pixels = np.zeros((500, 900, 3), np.uint8)
    for source in (pixels, Image.fromarray(pixels), pyvips.Image.new_from_array(pixels)):
        assert await pool.measure(source) == await pool.measure(encoded("PNG", 900, 500))


async def test_nothing_but_the_header_is_read(pool, monkeypatch):
    monkeypatch.setattr("kestrel_engine.preprocess.pool.CHEAP_SECONDS", 0.0)
    data = encoded("JPEG", 2000, 1500)
    found = await asyncio.gather(*(pool.measure(data[: len(data) // 4 + i]) for i in range(5)))
    assert {each.size for each in found} == {(2000, 1500)}
    assert pool.load.expensive_bytes == pool.load.waiting_pixels == pool.load.running == 0


async def test_what_is_refused(pool):
    with pytest.raises(UnsupportedImageError, match="not in a supported format"):
        await pool.measure(b"no image")
    with pytest.raises(ImageTooLargeError, match="20:1"):
        await pool.measure(encoded("PNG", 2100, 100))
    with pytest.raises(InvalidRequest, match="least is 8x8"):
        await pool.measure(InRegion(encoded("PNG", 100, 100), (0, 0, 0.01, 0.01)))


@pytest.mark.parametrize(
    "message",
    [
        {"size": [0, 5]},
        {"size": [10**9, 10**9]},
        {"size": [1]},
        {"size": ["a", 2]},
        {"done": {"width": 5, "height": 5, "keys": ["0" * 32], "crop_keys": None, "seconds": 0}},
        {"cost": Cost(1, 1, 1.0)._asdict()},
    ],
)
async def test_a_decoder_that_an_image_controls_gives_no_other_answer(message: dict[str, Any]):
    result = asyncio.get_running_loop().create_future()
    job = ImageJob(b"", "", None, result, "", header_only=True)
    answers = Answers(LIMITS.max_pixels, VISION, 0)
    assert answers.read({"size": [3, 5]}, job, -1, None) == HeaderSize(3, 5)
    with pytest.raises((KeyError, TypeError, ValueError)):
        answers.read(message, job, -1, None)
    job.header_only = False
    if "size" in message:
        with pytest.raises(KeyError):
            answers.read(message, job, -1, None)
