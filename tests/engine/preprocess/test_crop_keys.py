"""Keys of crops: equal keys mean equal crops, although the crops that a device makes are known by what they read."""

import dataclasses

import numpy as np
import pytest

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.crop_keys import _tiles_read, crop_keys
from kestrel_engine.preprocess.crops import cut_crops, device_makes_crops, select_tiling
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.types.requests import PreparedImage

FULL = VisionConfig()
SMALL = VisionConfig(crop_size=56, max_crops=12, overlap_margin=1)
MANY = 100_000_000
SIZES = {
    "shrinks": (SMALL, 500, 301),
    "shrinks by means": (SMALL, 1501, 1000),
    "grows": (SMALL, 97, 113),
    "shrinks and grows": (SMALL, 90, 801),
    "one row": (SMALL, 900, 57),
    "a screen": (FULL, 1920, 1080),
    "a camera": (FULL, 640, 480),
}


def random_pixels(width: int, height: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def made(pixels: np.ndarray, vision: VisionConfig) -> PreparedImage:
    """The image with its crops, made by libvips."""
    return cut_crops(DecodedImage(pixels), vision)


def keys(pixels: np.ndarray, vision: VisionConfig) -> tuple[str, ...]:
    """The keys of an image whose crops a device makes."""
    image = cut_crops(DecodedImage(pixels), vision, device_pixels=MANY)
    assert image.crops is None
    return crop_keys(image, vision)


@pytest.mark.parametrize("name", SIZES)
def test_a_tile_depends_on_nothing_but_what_it_reads(name):
    vision, width, height = SIZES[name]
    tiling = select_tiling(width, height, vision)
    places = _tiles_read(width, height, tiling, vision)
    before = random_pixels(width, height, 1)
    crops, of_crops = made(before, vision).crops[1:], keys(before, vision)[1:]
    assert len(crops) == len(places) > 1
    chosen = sorted({0, len(places) // 2, len(places) - 1})
    for index in chosen:
        rows, columns = (slice(*edges) for edges in places[index])
        after = random_pixels(width, height, 2)
        after[rows, columns] = before[rows, columns]
        np.testing.assert_array_equal(made(after, vision).crops[1 + index], crops[index])
        assert keys(after, vision)[1 + index] == of_crops[index]
        # The first and the last pixel that it reads count.
        for edge in (0, -1):
            changed = after.copy()
            changed[rows, columns][edge, edge] ^= 1
            assert keys(changed, vision)[1 + index] != of_crops[index]
    # It reads about as much as it shows, so crops that keep their pixels are found.
    (_, bottom), (_, right) = places[0]
    assert bottom < height or tiling[0] == 1
    assert right < width or tiling[1] == 1


def test_random_changes():
    """Rectangles anywhere, also one pixel: every crop with an equal key is equal, and far crops keep their keys."""
    numbers = np.random.default_rng(3)
    kept = tried = 0
    while tried < 25:
        width, height = (int(side) for side in numbers.integers(60, 400, 2))
        if not device_makes_crops(width, height, SMALL, MANY):
            continue
        tried += 1
        before = random_pixels(width, height, tried)
        after = before.copy()
        left, top = int(numbers.integers(width)), int(numbers.integers(height))
        across, down = (int(side) for side in numbers.choice([1, 2, 15, 60], 2))
        after[top : top + down, left : left + across] ^= numbers.integers(1, 256, dtype=np.uint8)
        first, second = made(before, SMALL), made(after, SMALL)
        same = [a == b for a, b in zip(keys(before, SMALL), keys(after, SMALL), strict=True)]
        assert not same[0]
        kept += sum(same)
        for index, is_same in enumerate(same):
            if is_same:
                np.testing.assert_array_equal(first.crops[index], second.crops[index])
    assert kept > 25


def test_equal_pixels_elsewhere_are_another_crop():
    """Two tiles of an image of one colour, or of two images of other sizes, may differ in their edges."""
    grey = np.full((301, 500, 3), 7, np.uint8)
    found = keys(grey, SMALL)
    assert len(set(found)) == len(found)
    assert not set(found) & set(keys(np.full((300, 500, 3), 7, np.uint8), SMALL))


def test_an_overview_alone_is_the_overview_of_the_image():
    image = cut_crops(DecodedImage(random_pixels(500, 301, 4)), SMALL, device_pixels=MANY)
    image = dataclasses.replace(image, crop_keys=crop_keys(image, SMALL))
    overview = image.overview()
    assert overview.crop_keys == image.crop_keys[:1]
    assert (overview.crops, overview.tiling) == (None, (1, 1))


@pytest.mark.parametrize("device_pixels", [0, MANY])
async def test_the_pool_gives_keys_of_a_namespace(device_pixels):
    pool = PreprocessPool(
        1, ImageLimits(), SMALL, device_pixels=device_pixels, with_crop_keys=True, cache_bytes=10**7
    )
    try:
        before = random_pixels(300, 200, 5)
        after = before.copy()
        after[:5, :5] ^= 1
        first, second, repeated = [
            (await pool.prepare(pixels, "a")).image for pixels in (before, after, before.copy())
        ]
        other = (await pool.prepare(before, "b")).image
        assert repeated is first
        assert len(first.crop_keys) == first.num_distinct > 3
        assert first.crop_keys[0] != second.crop_keys[0]
        assert first.crop_keys[1] != second.crop_keys[1]
        assert first.crop_keys[-1] == second.crop_keys[-1]
        assert not set(first.crop_keys) & set(other.crop_keys)
    finally:
        pool.close()
