"""Regions and tiles: their geometry, and their crops against those of images that were cut by hand."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageTooLargeError, InvalidRequest
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.decoding.open_image import OnBackground
from kestrel_engine.preprocess.looks import InRegion, Selection, Tiled, Tiles, regions
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.encoded import encoded

LIMITS, VISION = ImageLimits(), VisionConfig()
PIXELS = np.random.default_rng(1).integers(0, 256, (500, 800, 3), dtype=np.uint8)
TILES = Tiles(rows=2, columns=3, overlap=0.25)


def with_pool(use, **options):
    async def run():
        pool = PreprocessPool(1, LIMITS, VISION, **options)
        try:
            return await use(pool)
        finally:
            pool.close()

    return asyncio.run(run())


def cut(region, pixels=PIXELS) -> np.ndarray:
    part = pixels[region.top : region.top + region.height, region.left : region.left + region.width]
    return np.ascontiguousarray(part)


@pytest.mark.parametrize("size", [(800, 500), (37, 41), (4001, 333)])
@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5])
def test_tiles_cover_the_image_and_overlap(size, overlap):
    width, height = size
    tiles = Tiles(rows=2, columns=3, overlap=overlap)
    first, *looks = regions(width, height, Selection(None, tiles))
    assert first is None
    covered = np.zeros((height, width), int)
    for look in looks:
        covered[look.top : look.top + look.height, look.left : look.left + look.width] += 1
    assert covered.min() >= 1
    assert len({look.height for look in looks}) <= 2
    shared = looks[0].left + looks[0].width - looks[1].left
    assert shared == pytest.approx(overlap * looks[0].width, abs=2)
    assert looks[-1].edges[2:] == (1, 1)


def test_a_region_has_whole_pixels_and_tiles_of_its_own():
    box = (0.1, 0.2, 0.30000001192092896, 0.5)
    (region,) = regions(1000, 500, Selection(box, None))
    assert (region.left, region.top, region.width, region.height) == (100, 100, 200, 150)
    assert region.edges == (0.1, 0.2, 0.3, 0.5)
    whole, *tiles = regions(1000, 500, Selection(box, TILES))
    assert whole == region
    assert min(tile.left for tile in tiles) == 100
    assert max(tile.left + tile.width for tile in tiles) == 300
    (odd,) = regions(1000, 500, Selection((0.0005, 0, 0.5005, 1), None))
    assert (odd.left, odd.width) == (0, 501)


@pytest.mark.parametrize("device_pixels", [0, 10**6])
def test_looks_have_the_crops_of_images_that_are_cut_by_hand(device_pixels):
    async def use(pool):
        return await pool.prepare(Tiled(InRegion(encoded(PIXELS, "PNG"), (0.25, 0, 1, 1)), TILES))

    looks = with_pool(use, device_pixels=device_pixels).looks
    assert len(looks) == len({look.key for look in looks}) == 7
    for look in looks:
        expected = cut_crops(DecodedImage(cut(look.region)), VISION, device_pixels=device_pixels)
        assert (look.width, look.height) == (expected.width, expected.height)
        assert look.tiling == expected.tiling
        assert look.image_size == (800, 500)
        for name in ("crops", "pixels"):
            found, wanted = getattr(look, name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            assert found is None or (found == wanted).all()


def test_a_region_of_a_turned_transparent_or_raw_image():
    turned = Image.Exif()
    turned[0x0112] = 6
    box = (0.5, 0, 1, 0.5)

    async def use(pool):
        sources = [
            encoded(PIXELS, "PNG", exif=turned),
            PIXELS,
            OnBackground(encoded(PIXELS, "PNG"), (1, 2, 3)),
        ]
        return [(await pool.prepare(InRegion(source, box))).image for source in sources]

    turned_image, raw, on_background = with_pool(use)
    upright = np.rot90(PIXELS, -1)
    assert turned_image.image_size == (500, 800)
    expected = cut_crops(DecodedImage(cut(turned_image.region, upright)), VISION)
    assert (turned_image.crops == expected.crops).all()
    assert (raw.crops == on_background.crops).all()
    assert raw.key != on_background.key


def test_an_image_is_decoded_once_and_its_looks_are_kept_together():
    async def use(pool):
        tiled = Tiled(encoded(PIXELS, "JPEG"), TILES)
        first, second = await asyncio.gather(pool.prepare(tiled), pool.prepare(tiled))
        again = await pool.prepare(Tiled(encoded(PIXELS, "JPEG"), TILES))
        return first, second, again

    first, second, again = with_pool(use, cache_bytes=2**26)
    assert first is second
    assert all(a is b for a, b in zip(first.looks, again.looks, strict=True))


def test_what_is_too_thin_or_nested_is_refused():
    async def use(pool):
        with pytest.raises(ImageTooLargeError, match="sides of"):
            await pool.prepare(InRegion(np.zeros((8, 8000, 3), np.uint8), (0, 0, 1, 1)))
        with pytest.raises(InvalidRequest, match="is set twice"):
            await pool.prepare(InRegion(InRegion(PIXELS, (0, 0, 1, 1)), (0, 0, 1, 1)))
        with pytest.raises(ImageTooLargeError, match="sides of"):
            strip = Tiles(rows=12, columns=1, overlap=0)
            await pool.prepare(Tiled(np.zeros((100, 1000, 3), np.uint8), strip))

    with_pool(use)
