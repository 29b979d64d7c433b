"""The pool: off the event loop, bounded, cancellable, closable."""

import asyncio
import gc
import io
import os
import threading
import time
import weakref

import numpy as np
import pytest
from PIL import Image

from kestrel_engine.config import ImageLimits
from kestrel_engine.errors import (
    EngineClosed,
    ImageTooLargeError,
    PixelsWaiting,
    UnsupportedImageError,
)
from kestrel_engine.model_config import VisionConfig
from kestrel_engine.preprocess.crops import prepare
from kestrel_engine.preprocess.images import num_pixels, open_image
from kestrel_engine.preprocess.pool import PreprocessPool


def pixels(seed: int = 0, height: int = 90, width: int = 120) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Gated(os.PathLike):
    """A path whose use waits for ``gate``: a picture that takes as long as the test wants."""

    def __init__(self, path):
        self.path, self.gate, self.started = path, threading.Event(), threading.Event()

    def __fspath__(self):
        self.started.set()
        assert self.gate.wait(10)
        return str(self.path)


@pytest.fixture
def gated(tmp_path):
    """Makes gated pictures, and opens the gates that the test left shut."""
    path = tmp_path / "picture.png"
    Image.fromarray(pixels()).save(path)
    gates = []

    def make() -> Gated:
        picture = Gated(path)
        gates.append(picture.gate)
        return picture

    yield make
    for gate in gates:
        gate.set()


async def started(picture: Gated) -> None:
    assert await asyncio.to_thread(picture.started.wait, 10)


@pytest.fixture
def pool():
    pool = PreprocessPool(1, ImageLimits(), VisionConfig())
    yield pool
    pool.close()


async def test_gives_what_the_functions_give(pool):
    buffer = io.BytesIO()
    Image.fromarray(pixels()).save(buffer, "PNG")
    before = time.perf_counter()
    prepared = await pool.prepare(buffer.getvalue())
    took = time.perf_counter() - before
    expected = prepare(open_image(pixels(), ImageLimits()), VisionConfig())
    assert prepared.image.key == expected.key
    assert np.array_equal(prepared.image.crops, expected.crops)
    assert 0 < prepared.seconds <= took


async def test_errors_come_through_and_the_pool_goes_on(pool):
    with pytest.raises(UnsupportedImageError):
        await pool.prepare(b"no picture")
    with pytest.raises(ImageTooLargeError):
        await pool.prepare(pixels(width=10, height=300))
    assert (await pool.prepare(pixels())).image.num_crops == 2


async def test_the_event_loop_runs_on_meanwhile(pool, gated):
    slow = gated()
    job = asyncio.create_task(pool.prepare(slow))
    await started(slow)
    assert not job.done()
    slow.gate.set()
    await job


async def test_runs_no_more_than_its_threads(gated):
    pool = PreprocessPool(2, ImageLimits(), VisionConfig())
    pictures = [gated() for _ in range(3)]
    jobs = [asyncio.create_task(pool.prepare(picture)) for picture in pictures]
    await started(pictures[0])
    await started(pictures[1])
    assert not pictures[2].started.is_set()
    pictures[1].gate.set()
    await jobs[1]
    await started(pictures[2])
    for picture in pictures:
        picture.gate.set()
    await asyncio.gather(*jobs)
    pool.close()


async def test_a_picture_alone_is_split_and_one_of_many_is_not(gated, monkeypatch):
    """Three pieces that meet in a barrier need three threads; with five pictures about, one thread does them all."""
    barriers, names = [threading.Barrier(3), None, threading.Barrier(3)], [set(), set(), set()]

    def split(decoded, vision, *, run, allocate):
        barrier, by = barriers.pop(0), names[2 - len(barriers)]

        def piece() -> None:
            by.add(threading.current_thread().name)
            if barrier is not None:
                barrier.wait(10)

        if run is None:
            piece()
        else:
            run([piece] * 3)
        return prepare(decoded, vision, run=run, allocate=allocate)

    pool = PreprocessPool(6, ImageLimits(), VisionConfig())
    pictures = [gated() for _ in range(4)]
    with monkeypatch.context() as patched:
        patched.setattr("kestrel_engine.preprocess.pool.prepare", split)
        await pool.prepare(pixels(0))
        jobs = [asyncio.create_task(pool.prepare(picture)) for picture in pictures]
        for picture in pictures:
            await started(picture)
        await pool.prepare(pixels(2))
    for picture in pictures:
        picture.gate.set()
    await asyncio.gather(*jobs)
    with monkeypatch.context() as patched:
        patched.setattr("kestrel_engine.preprocess.pool.prepare", split)
        await pool.prepare(pixels(3))
    pool.close()
    assert [len(by) for by in names] == [3, 1, 3]


async def test_a_piece_that_fails_fails_its_picture_only(monkeypatch):
    """Whichever thread came upon it; the other pieces are done or left."""

    def fails() -> None:
        raise ImageTooLargeError("image", "in a piece")

    def broken(decoded, vision, *, run, allocate):
        run([lambda: time.sleep(0.01), fails, lambda: time.sleep(0.01)] * 2)
        raise AssertionError("went on")

    pool = PreprocessPool(3, ImageLimits(), VisionConfig())
    with monkeypatch.context() as patched:
        patched.setattr("kestrel_engine.preprocess.pool.prepare", broken)
        for seed in range(5):
            with pytest.raises(ImageTooLargeError, match="in a piece"):
                await pool.prepare(pixels(seed))
    assert (await pool.prepare(pixels())).image.num_crops == 2
    pool.close()


async def test_a_picture_is_finished_alone_when_the_pool_closes_meanwhile(gated):
    pool = PreprocessPool(4, ImageLimits(), VisionConfig())
    running = gated()
    job = asyncio.create_task(pool.prepare(running))
    await started(running)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    while not pool._executor._shutdown:
        await asyncio.sleep(0.001)
    running.gate.set()
    assert (await job).image.num_crops == 2
    await closing


async def test_a_repeat_waits_for_no_thread(gated):
    pool = PreprocessPool(1, ImageLimits(), VisionConfig(), cache_bytes=2**24)
    data = png(60, 40)
    first = await pool.prepare(data)
    slow = gated()
    busy = asyncio.create_task(pool.prepare(slow))
    await started(slow)
    again = await asyncio.wait_for(pool.prepare(data), 5)
    assert again.image is first.image
    assert not busy.done()
    tenants = asyncio.create_task(pool.prepare(data, "tenant"))
    await asyncio.sleep(0.05)
    assert not tenants.done(), "nothing is shared between namespaces"
    slow.gate.set()
    await busy
    assert (await tenants).image.key != first.image.key
    pool.close()
    with pytest.raises(EngineClosed):
        await pool.prepare(data)


async def test_seconds_leave_waiting_out(pool, gated):
    slow = gated()
    first = asyncio.create_task(pool.prepare(slow))
    await started(slow)
    second = asyncio.create_task(pool.prepare(pixels()))
    await asyncio.sleep(0.3)
    slow.gate.set()
    assert (await first).seconds >= 0.3
    assert (await second).seconds < 0.3


async def test_a_cancelled_waiting_job_never_starts_and_frees_its_picture(pool, gated):
    running, waiting = gated(), gated()
    gone = weakref.ref(waiting)
    waiting_started = waiting.started
    first = asyncio.create_task(pool.prepare(running))
    await started(running)
    second = asyncio.create_task(pool.prepare(waiting))
    third = asyncio.create_task(pool.prepare(pixels()))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    del waiting, second
    await asyncio.sleep(0)  # the loop itself holds the finished task until we yield
    gc.collect()
    assert gone() is None  # while the first still runs
    running.gate.set()
    await asyncio.gather(first, third)
    assert not waiting_started.is_set()


async def test_a_cancelled_running_job_holds_its_thread_until_it_ends(pool, gated):
    running, waiting = gated(), gated()
    first = asyncio.create_task(pool.prepare(running))
    await started(running)
    second = asyncio.create_task(pool.prepare(waiting))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.05)
    assert not waiting.started.is_set()
    waiting.gate.set()
    running.gate.set()
    assert (await second).image.num_crops == 2


async def test_close_waits_for_running_jobs_and_refuses_new_ones(gated):
    pool = PreprocessPool(1, ImageLimits(), VisionConfig())
    running = gated()
    first = asyncio.create_task(pool.prepare(running))
    await started(running)
    second = asyncio.create_task(pool.prepare(pixels()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    await asyncio.sleep(0.05)
    assert not closing.done()
    running.gate.set()
    assert (await first).image.num_crops == 2
    with pytest.raises(EngineClosed):
        await second
    await closing
    with pytest.raises(EngineClosed):
        await pool.prepare(pixels())
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kestrel-preprocess")]


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(0, height, width)).save(file, "PNG")
    return file.getvalue()


async def test_pixels_that_wait_are_bounded(gated):
    """A picture that need not wait is not counted, and one alone always may."""
    limits = ImageLimits(max_aspect_ratio=100)
    pool = PreprocessPool(1, limits, VisionConfig(), max_waiting_pixels=5000)
    busy = gated()
    running = asyncio.create_task(pool.prepare(busy))
    await started(busy)
    first = asyncio.create_task(pool.prepare(png(100, 100)))
    while pool._waiting_pixels == 0:
        await asyncio.sleep(0.001)
    assert pool._waiting_pixels == 10_000, "more than the limit, but alone"
    for source in (png(1, 1), pixels(0, 1, 1)):
        with pytest.raises(PixelsWaiting, match="max_queued_pixels"):
            await pool.prepare(source)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert pool._waiting_pixels == 0
    waiting = [asyncio.create_task(pool.prepare(source)) for source in (png(50, 50), png(50, 50))]
    broken = asyncio.create_task(pool.prepare(b"no picture"))
    while pool._waiting_pixels < 5000:
        await asyncio.sleep(0.001)
    with pytest.raises(PixelsWaiting):
        await pool.prepare(png(50, 50))
    busy.gate.set()
    await asyncio.gather(running, *waiting)
    with pytest.raises(UnsupportedImageError):
        await broken
    assert pool._waiting_pixels == 0
    pool.close()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "AVIF"])
def test_the_pixels_are_told_by_the_header(format):
    file = io.BytesIO()
    Image.fromarray(pixels(0, 30, 40)).save(file, format)
    assert num_pixels(file.getvalue()) == 1200
    assert num_pixels(memoryview(file.getvalue())) == 1200


@pytest.mark.parametrize(
    "source", [b"", b"rubbish", b"\xff\xd8\xff", "no-such-file", np.zeros(3), object()]
)
def test_what_is_no_picture_has_no_pixels(source):
    assert num_pixels(source) == 0
