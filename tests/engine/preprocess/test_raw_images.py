"""Raw pixels whose crops the device makes: no decoder, one look at each pixel, and the keys of a fresh pool."""

import asyncio

import numpy as np
import pytest

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import EngineClosed, ImageTooLargeError
from kestrel_engine.preprocess import raw_images
from kestrel_engine.preprocess.crop_keys import crop_keys
from kestrel_engine.preprocess.looks import InRegion
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.types.model_config import VisionConfig

VISION = VisionConfig(crop_size=56, max_crops=12, overlap_margin=1)
WIDTH, HEIGHT = 300, 200


def pool_of(*, cache_bytes: int = 10**7, with_crop_keys: bool = True) -> PreprocessPool:
    return PreprocessPool(
        *(2, ImageLimits(max_pixels=10**6), VISION),
        cache_bytes=cache_bytes,
        device_pixels=10**7,
        with_crop_keys=with_crop_keys,
    )


@pytest.fixture
async def pool():
    pool = pool_of()
    yield pool
    pool.close()


def pixels(seed: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def frozen(array: np.ndarray) -> np.ndarray:
    """The array in bytes, as in a message."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.shape)


@pytest.mark.parametrize("threads_from", [0, 10**9])
async def test_frames_have_the_keys_of_single_images(pool, monkeypatch, threads_from):
    """Whatever changed since the frame before: nothing, one pixel, the image's corners, rectangles."""
    monkeypatch.setattr(raw_images, "_SEVERAL_THREADS_BYTES", threads_from)
    alone = pool_of(cache_bytes=0)
    numbers = np.random.default_rng(1)
    now = pixels(2)
    seen: dict[bytes, object] = {}
    try:
        for number in range(40):
            now = now.copy()
            if number % 4:
                left, top = int(numbers.integers(WIDTH)), int(numbers.integers(HEIGHT))
                across, down = (int(side) for side in numbers.choice([1, 2, 20, 150], 2))
                now[top : top + down, left : left + across] ^= 1
            if number in (9, 10):
                now[(0, -1)[number % 2], (0, -1)[number % 2], 2] ^= 128
            given = frozen(now) if number % 2 else now
            found = (await pool.prepare(given, "a")).image
            single = (await alone.prepare(now, "a")).image
            assert (found.key, found.crop_keys) == (single.key, single.crop_keys)
            assert found.source_digest == single.source_digest
            np.testing.assert_array_equal(found.pixels, now)
            assert seen.setdefault(now.tobytes(), found.key) == found.key
        assert len(set(seen.values())) == len(seen)
        plain = (await alone.prepare(now)).image
        assert plain.crop_keys == crop_keys(plain, VISION)
    finally:
        alone.close()


async def test_a_caller_may_change_its_array_later(pool):
    """Cameras write frames into one buffer. Views that cannot be written count as arrays that others may change."""
    buffer = pixels(3)
    view = buffer[:]
    view.flags.writeable = False
    for source in (buffer, view):
        buffer[:] = pixels(3)
        first = (await pool.prepare(source)).image
        buffer[0, 0] ^= 255
        second = (await pool.prepare(source)).image
        assert first.key != second.key and first.crop_keys[0] != second.crop_keys[0]
        np.testing.assert_array_equal(first.pixels, pixels(3))


async def test_pixels_in_bytes_are_not_copied_and_equal_ones_are_known(pool):
    message = frozen(pixels(4))
    first = (await pool.prepare(message)).image
    assert np.shares_memory(first.pixels, message)
    again, other = await asyncio.gather(
        pool.prepare(frozen(message)), pool.prepare(frozen(message), "other")
    )
    assert again.image is first and other.image.key != first.key
    pool.flush()
    assert (await pool.prepare(frozen(message))).image.key == first.key


async def test_forms_and_limits(pool):
    given = pixels(5)
    expected = (await pool.prepare(given)).image
    backwards = np.ascontiguousarray(given[:, :, ::-1])[:, :, ::-1]  # as BGR
    assert (await pool.prepare(backwards)).image is expected
    part = (await pool.prepare(InRegion(given, (0, 0, 0.5, 1)))).image
    assert part.source_digest == expected.source_digest and part.width == WIDTH // 2
    assert part.key != expected.key
    with pytest.raises(ImageTooLargeError, match="1200x1000"):
        await pool.prepare(np.zeros((1000, 1200, 3), np.uint8))
    with pytest.raises(ImageTooLargeError, match="45:1"):
        await pool.prepare(InRegion(np.zeros((2, 90, 3), np.uint8), (0, 0, 0.5, 1)))
    for shape in ((1, 1, 3), (2, 30, 3), (30, 2, 3)):
        tiny = np.ones(shape, np.uint8)
        np.testing.assert_array_equal((await pool.prepare(tiny)).image.pixels, tiny)
    without = pool_of(with_crop_keys=False)
    try:
        assert (await without.prepare(given)).image.crop_keys is None
    finally:
        without.close()
    with pytest.raises(EngineClosed):
        await without.prepare(given)


async def test_closing_ends_what_is_prepared(monkeypatch):
    monkeypatch.setattr(raw_images, "_SEVERAL_THREADS_BYTES", 0)
    pool = pool_of()
    running = asyncio.create_task(pool.prepare(pixels(7)))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(EngineClosed):
        await running


async def test_the_sizes_that_are_known_are_bounded(pool, monkeypatch):
    monkeypatch.setattr(raw_images, "_MOST_SIZES", 3)
    for width in range(60, 70):
        await pool.prepare(pixels(6, width, 60))
    assert len(pool._raw._last) == 3
