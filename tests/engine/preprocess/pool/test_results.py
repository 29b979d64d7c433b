"""What a pool gives: the crops of the plain functions, errors, seconds; and what it leaves behind: nothing."""

import asyncio
import errno
import gc
import os
import threading
import time

import numpy as np
import pytest
import pyvips

from kestrel_engine.errors import (
    EngineOverloaded,
    ImageDecodeError,
    ImageTooLargeError,
    UnsupportedImageError,
)
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.preprocess.processes import decoder_process
from kestrel_engine.preprocess.processes.segments import new_segment
from tests.engine.preprocess.decoders import decoders, held_up
from tests.engine.preprocess.pool.conftest import LIMITS, VISION, asked, decoders_of, pixels, png
from tests.waiting import until


async def test_gives_what_the_functions_give(make_pool, tmp_path):
    pool = make_pool()
    array, data = pixels(), png()
    path = tmp_path / "image.png"
    path.write_bytes(data)
    image = pyvips.Image.new_from_memory(array.data, 120, 90, 3, "uchar")
    of_array, of_file = (cut_crops(open_image(source, LIMITS), VISION) for source in (array, data))
    assert of_array.key != of_file.key
    for source in (data, bytearray(data), array, path, image):
        began = time.perf_counter()
        found = await pool.prepare(source)
        assert 0 < found.seconds <= time.perf_counter() - began
        expected = of_array if source is array or source is image else of_file
        assert found.image.key == expected.key
        assert np.array_equal(found.image.crops, expected.crops)
        assert found.image.tiling == expected.tiling
        assert (found.image.width, found.image.height) == (120, 90)


@pytest.mark.parametrize("soon", [False, True], ids=["before the next image", "by the timer"])
async def test_without_a_segment_for_the_next_image_a_decoder_is_replaced(
    make_pool, monkeypatch, soon
):
    before, asked = decoders(), []

    def one_segment() -> int:
        asked.append(decoders() - before)
        if len(asked) > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return new_segment()

    pool = make_pool()
    with monkeypatch.context() as patched:
        patched.setattr(decoder_process, "new_segment", one_segment)
        patched.setattr(decoder_process, "_RENEWAL_S", 0.001 if soon else 3600)
        await pool.prepare(pixels(99))
        if soon:
            await until(lambda: len(asked) == 2 and not pool.load.idle)
        else:
            with pytest.raises(EngineOverloaded, match="Too many open files"):
                await pool.prepare(pixels(1))
    (first,) = asked[1]
    found = await pool.prepare(pixels(2))
    assert found.image.key == cut_crops(open_image(pixels(2), LIMITS), VISION).key
    assert first not in decoders()


async def test_a_split_image_has_the_same_crops(make_pool):
    pool = make_pool(3)
    data = png(850, 600)
    found, expected = await pool.prepare(data), cut_crops(open_image(data, LIMITS), VISION)
    assert found.image.key == expected.key
    assert np.array_equal(found.image.crops, expected.crops)


async def test_crops_stay_as_they_are_whatever_their_decoder_does_next(make_pool):
    """Each image has memory of its own, which a decoder prepares by the size of the image before."""
    pool, sizes = make_pool(), ((120, 90), (850, 600), (850, 600), (120, 90), (1200, 900))
    sources = [png(*size, seed=seed) for seed, size in enumerate(sizes)]
    found = [(await pool.prepare(source)).image for source in sources]
    used = decoders()
    pool.close()
    await until(lambda: not decoders() & used)
    for source, image in zip(sources, found, strict=True):
        assert np.array_equal(image.crops, cut_crops(open_image(source, LIMITS), VISION).crops)


async def test_images_leave_no_descriptor_open(make_pool):
    pool = make_pool(cache_bytes=2**28)
    await pool.prepare(png())
    gc.collect()  # What earlier tests have left is closed now.
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(1, 5):
        await pool.prepare(png(seed=seed))
        with pytest.raises(ImageDecodeError):
            await pool.prepare(b"\xff\xd8\xff" + bytes([seed]))
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_images_up_to_a_size_keep_their_pixels_for_the_device(make_pool):
    pool = make_pool(device_pixels=120 * 90)
    found, expected = await pool.prepare(png()), cut_crops(open_image(png(), LIMITS), VISION)
    assert found.image.crops is None and found.image.key == expected.key
    assert np.array_equal(found.image.pixels, open_image(png(), LIMITS).pixels)
    assert (found.image.tiling, found.image.num_crops) == (expected.tiling, expected.num_crops)
    larger = await pool.prepare(png(121, 90))
    assert larger.image.pixels is None and larger.image.crops is not None


async def test_errors_come_through_and_the_pool_goes_on(make_pool):
    pool = make_pool()
    [before] = await decoders_of(pool)
    with pytest.raises(UnsupportedImageError, match="supported are JPEG"):
        await pool.prepare(b"no picture")
    with pytest.raises(ImageDecodeError, match="0 bytes"):
        await pool.prepare(b"")
    with pytest.raises(ImageDecodeError, match="broken or truncated PNG"):
        await pool.prepare(png()[:200])
    with pytest.raises(ImageTooLargeError):
        await pool.prepare(pixels(width=10, height=300))
    assert (await pool.prepare(pixels())).image.num_crops == 2
    assert before in decoders(), "an image that is refused costs no process"


async def test_those_who_ask_together_share_one_image_and_its_error(make_pool):
    pool = make_pool()
    pids = await decoders_of(pool)
    with held_up(pids):
        good = [asyncio.create_task(pool.prepare(png())) for _ in range(3)]
        bad = [asyncio.create_task(pool.prepare(b"none")) for _ in range(3)]
        await asked(pool, 6)
        assert pool.load.images == 2
        good[0].cancel()
    first, *others = await asyncio.gather(*good, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert others[0].image is others[1].image
    errors = await asyncio.gather(*bad, return_exceptions=True)
    assert all(isinstance(error, UnsupportedImageError) for error in errors)
    assert not pool.load.images


async def test_seconds_leave_waiting_out(moved_clock, make_pool):
    pool = make_pool(timeout_s=10_000.0)
    with held_up(await decoders_of(pool)):
        waiting = [asyncio.create_task(pool.prepare(pixels(seed))) for seed in range(2)]
        await asked(pool, 2)
        moved_clock.advance(1000)
    found = [await job for job in waiting]
    assert sum(each.seconds for each in found) < 1000


async def test_threads_of_this_process_do_no_decoding(make_pool):
    pool = make_pool()
    before = {thread.name for thread in threading.enumerate()}
    await pool.prepare(png(200, 150))
    assert {thread.name for thread in threading.enumerate()} == before
