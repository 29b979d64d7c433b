"""The pool: its processes, who is served first, what is bounded, and what is left when something ends."""

import asyncio
import contextlib
import errno
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import pyvips
from PIL import Image

from kestrel_engine.config.images import ImageLimits
from kestrel_engine.errors import (
    EngineClosed,
    EngineOverloaded,
    ImageDecodeError,
    ImageTooLargeError,
    ImageTooSlowError,
    PixelsWaiting,
    UnsupportedImageError,
)
from kestrel_engine.preprocess.crops import prepare
from kestrel_engine.preprocess.decoding.images import open_image
from kestrel_engine.preprocess.pool import EXPENSIVE_NICE, PreprocessPool
from kestrel_engine.preprocess.processes import decoder_process
from kestrel_engine.preprocess.processes.decoder_process import DecoderProcess
from kestrel_engine.processes.template import confined
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.decoders import decoders, held_up, nice_of, state
from tests.waiting import until, wait_until

LIMITS, VISION = ImageLimits(), VisionConfig()
ROOT = Path(__file__).parents[3]


def pixels(seed: int = 0, height: int = 90, width: int = 120) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(width: int = 120, height: int = 90, seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, height, width)).save(file, "PNG")
    return file.getvalue()


@functools.cache
def huge(seed: int = 0) -> bytes:
    """3 megapixels of one colour in some 10 kB, which are expensive here: ``CHEAP_SECONDS`` is lower."""
    image = pyvips.Image.black(2000, 1625, bands=3) + seed
    return image.cast("uchar").copy(interpretation="srgb").pngsave_buffer(compression=1)


@pytest.fixture
def make_pool(monkeypatch):
    monkeypatch.setattr("kestrel_engine.preprocess.pool.CHEAP_SECONDS", 0.15)
    wait_until(lambda: not decoders())  # What the test before has killed may live for a moment.
    pools = []

    def make(processes: int = 1, limits: ImageLimits = LIMITS, **options) -> PreprocessPool:
        pools.append(PreprocessPool(processes, limits, VISION, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


NICE = min(19, nice_of(os.getpid()) + EXPENSIVE_NICE)
"""Of a process that decodes an expensive image: above the niceness of the tests."""


@contextlib.contextmanager
def expensive_held_up(cheap: set[int]) -> Iterator[set[int]]:
    """Expensive decoders stop before they get their image, until the end of the block. Gives those that have stopped.
    ``cheap``: the decoders that there are."""
    held: set[int] = set()
    is_open = False

    def started() -> set[int]:
        return {pid for pid in decoders() - cheap - held if nice_of(pid) == NICE}

    class Held(DecoderProcess):
        def __init__(self, *given, nice: int, **more):
            super().__init__(*given, nice=nice, **more)
            if nice and not is_open:
                found = wait_until(started)
                for pid in found:
                    os.kill(pid, signal.SIGSTOP)
                held.update(found)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kestrel_engine.preprocess.pool.DecoderProcess", Held)
        try:
            yield held
        finally:
            is_open = True
            for pid in held:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


async def decoders_of(pool: PreprocessPool) -> set[int]:
    """The decoders that a pool has once it has been used."""
    before = decoders()
    await pool.prepare(pixels(99))
    return decoders() - before


async def asked(pool: PreprocessPool, callers: int) -> None:
    """Waits until so many callers wait for images."""
    await until(lambda: pool.load.callers == callers)


async def test_gives_what_the_functions_give(make_pool, tmp_path):
    pool = make_pool()
    array, data = pixels(), png()
    path = tmp_path / "image.png"
    path.write_bytes(data)
    image = pyvips.Image.new_from_memory(array.data, 120, 90, 3, "uchar")
    of_array, of_file = (prepare(open_image(source, LIMITS), VISION) for source in (array, data))
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
    pool = make_pool()
    (first,) = await decoders_of(pool)
    with monkeypatch.context() as patched:
        patched.setattr(decoder_process, "new_segment", no_segment)
        if soon:
            await until(lambda: first not in decoders() and not pool.load.idle)
        else:
            with pytest.raises(EngineOverloaded, match="Too many open files"):
                await pool.prepare(pixels(1))
    found = await pool.prepare(pixels(2))
    assert found.image.key == prepare(open_image(pixels(2), LIMITS), VISION).key
    assert first not in decoders()


def no_segment() -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_an_image_right_after_another_has_its_own_crops(make_pool):
    """The decoder gets the segment for the second one before its timer ends."""
    pool = make_pool()
    found = [await pool.prepare(pixels(seed)) for seed in range(3)]
    for seed, each in enumerate(found):
        expected = prepare(open_image(pixels(seed), LIMITS), VISION)
        assert np.array_equal(each.image.crops, expected.crops)


async def test_a_split_image_has_the_same_crops(make_pool):
    pool = make_pool(3)
    data = png(850, 600)
    found, expected = await pool.prepare(data), prepare(open_image(data, LIMITS), VISION)
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
        assert np.array_equal(image.crops, prepare(open_image(source, LIMITS), VISION).crops)


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
    found, expected = await pool.prepare(png()), prepare(open_image(png(), LIMITS), VISION)
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


async def test_the_event_loop_runs_on_meanwhile_and_no_more_images_than_processes(make_pool):
    pool = make_pool(2)
    before = decoders()
    await asyncio.gather(pool.prepare(pixels(0)), pool.prepare(pixels(1)))
    pids = decoders() - before
    assert len(pids) == 2
    with held_up(pids):
        jobs = [asyncio.create_task(pool.prepare(pixels(seed))) for seed in range(4)]
        await asked(pool, 4)
        assert not any(job.done() for job in jobs)
        assert decoders() - before == pids
    for job in jobs:
        await job


async def test_a_repeat_waits_for_no_decoder(make_pool):
    pool = make_pool(cache_bytes=2**24)
    data = png(60, 40)
    first = await pool.prepare(data)
    pids = await decoders_of(pool) or decoders()
    with held_up(pids):
        busy = asyncio.create_task(pool.prepare(pixels(3)))
        await asked(pool, 1)
        again = await pool.prepare(data)
        assert again.image is first.image
        assert not busy.done()
        tenants = asyncio.create_task(pool.prepare(data, "tenant"))
        await asked(pool, 2)
        assert not tenants.done(), "nothing is shared between namespaces"
    await busy
    assert (await tenants).image.key != first.image.key
    pool.close()
    with pytest.raises(EngineClosed):
        await pool.prepare(data)


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


async def test_an_expensive_image_has_a_process_of_its_own_and_small_ones_overtake_it(make_pool):
    pool = make_pool()
    cheap = await decoders_of(pool)
    with expensive_held_up(cheap) as held:
        expensive = asyncio.create_task(pool.prepare(huge()))
        await until(lambda: held)
        [own] = held
        for seed in range(3):
            await pool.prepare(pixels(seed))
        second = asyncio.create_task(pool.prepare(huge(1)))
        await until(lambda: pool.load.queued_expensive == 1)
        assert decoders() == cheap | {own}, "one expensive image at a time"
    assert (await expensive).image.width == 2000
    await until(lambda: not state(own))
    await second


@pytest.mark.parametrize(("decode_bytes", "together"), [(2**27, 2), (2**26, 1)])
async def test_expensive_images_run_within_the_budget_only(make_pool, decode_bytes, together):
    """Eight processes may run two expensive images, if there is memory for both."""
    pool = make_pool(8, decode_bytes=decode_bytes)
    with expensive_held_up(decoders()):
        jobs = [asyncio.create_task(pool.prepare(huge(seed))) for seed in range(2)]
        await until(lambda: pool.load.running_expensive + pool.load.queued_expensive == 2)
        assert pool.load.running_expensive == together
    await asyncio.gather(*jobs)
    assert pool.load.expensive_bytes == 0


async def test_an_image_beyond_the_whole_budget_is_refused(make_pool):
    pool = make_pool(decode_bytes=32 * 2**20)
    with pytest.raises(ImageTooLargeError, match=r"takes \d+ bytes to decode, the limit is \d+"):
        await pool.prepare(huge())


async def test_a_principal_with_one_image_does_not_wait_for_another_with_many(make_pool):
    pool = make_pool()
    order = []

    async def ask(principal: str, seed: int) -> None:
        await pool.prepare(png(seed=seed), principal=principal)
        order.append(principal)

    with held_up(await decoders_of(pool)):
        jobs = [asyncio.create_task(ask("many", seed)) for seed in range(8)]
        await asked(pool, 8)
        jobs.append(asyncio.create_task(ask("one", 50)))
        await asked(pool, 9)
    await asyncio.gather(*jobs)
    assert order.index("one") <= 2


@pytest.mark.parametrize("is_second_request", [False, True])
async def test_an_image_of_the_best_priority_overtakes_its_principals_others(
    make_pool, is_second_request
):
    """Also if a request of lesser priority was the first to need it."""
    pool = make_pool()
    order = []

    async def ask(seed: int, is_high: bool = False) -> None:
        await pool.prepare(png(seed=seed), principal="a", is_high=is_high)
        order.append(seed)

    with held_up(await decoders_of(pool)):
        jobs = [asyncio.create_task(ask(seed)) for seed in range(8)]
        await asked(pool, 8)
        if is_second_request:
            jobs.append(asyncio.create_task(ask(50)))
            await asked(pool, 9)
        jobs.append(asyncio.create_task(ask(50, is_high=True)))
        await asked(pool, len(jobs))
    await asyncio.gather(*jobs)
    assert order.index(50) <= 2
    assert order.count(50) == 1 + is_second_request
    assert pool.load.queued == 0


async def test_of_those_that_wait_the_cheap_go_first(make_pool):
    pool = make_pool()
    order = []

    async def ask(width: int) -> None:
        await pool.prepare(png(width, 200))
        order.append(width)

    with held_up(await decoders_of(pool)):
        jobs = [asyncio.create_task(ask(100))]
        await asked(pool, 1)
        jobs += [asyncio.create_task(ask(width)) for width in (3000, 1000, 200)]
        await asked(pool, 4)
    await asyncio.gather(*jobs)
    assert order == [100, 200, 1000, 3000]


async def test_an_image_that_takes_too_long_is_given_up_with_its_process(moved_clock, make_pool):
    pool = make_pool(timeout_s=600.0)
    pids = await decoders_of(pool)
    with held_up(pids):
        slow = asyncio.create_task(pool.prepare(png()))
        await asked(pool, 1)
        moved_clock.advance(601)
        with pytest.raises(ImageTooSlowError, match=r"more than 600 s to decode"):
            await slow
    await until(lambda: not decoders() & pids)
    assert (await pool.prepare(png())).image.num_crops == 2


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (signal.SIGSEGV, ImageDecodeError, "ended the process that decoded it .SIGSEGV"),
        (signal.SIGABRT, ImageDecodeError, "SIGABRT"),
        (signal.SIGKILL, EngineOverloaded, "killed from outside"),
    ],
)
async def test_a_process_that_dies_fails_its_image_alone(make_pool, number, error, words):
    pool = make_pool(2)
    before = decoders()
    await asyncio.gather(pool.prepare(pixels(0)), pool.prepare(pixels(1)))
    pids = decoders() - before
    with held_up(pids):
        jobs = [asyncio.create_task(pool.prepare(png(seed=seed))) for seed in range(3)]
        await asked(pool, 3)
        os.kill(min(pids), number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(min(pids), signal.SIGCONT)
        await until(lambda: not state(min(pids)))
    found = await asyncio.gather(*jobs, return_exceptions=True)
    failed = [each for each in found if isinstance(each, BaseException)]
    assert len(failed) == 1
    assert isinstance(failed[0], error)
    assert words.partition(" .")[0] in str(failed[0])


async def test_an_idle_decoder_that_dies_is_replaced(make_pool):
    pool = make_pool()
    [pid] = await decoders_of(pool)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not state(pid) and not pool.load.idle)
    assert (await pool.prepare(png())).image.num_crops == 2


async def test_the_template_is_started_again(make_pool):
    pool = make_pool()
    [pid] = await decoders_of(pool)
    killed = confined.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: not (state(killed) or state(pid)))  # Neither stays a zombie.
    await until(lambda: not pool.load.idle)
    assert (await pool.prepare(png())).image.num_crops == 2


async def test_a_cancelled_waiting_job_never_starts_and_frees_its_image(make_pool):
    pool = make_pool()

    class Source(np.ndarray):
        """An array that can be watched."""

    waiting = pixels(5).view(Source)
    gone = weakref.ref(waiting)
    with held_up(await decoders_of(pool)):
        first = asyncio.create_task(pool.prepare(pixels(0)))
        await asked(pool, 1)
        second = asyncio.create_task(pool.prepare(waiting))
        await asked(pool, 2)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        del waiting, second
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None
        assert not first.done()
    await first


async def test_an_expensive_image_that_nobody_waits_for_is_given_up(make_pool):
    pool = make_pool()
    cheap = await decoders_of(pool)
    with expensive_held_up(cheap) as held:
        job = asyncio.create_task(pool.prepare(huge()))
        await until(lambda: held)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await until(lambda: not decoders() & held)
    await until(lambda: pool.load.expensive_bytes == 0)


async def test_close_ends_running_images_at_once(make_pool):
    pool = make_pool()
    cheap = await decoders_of(pool)
    with expensive_held_up(cheap) as held:
        expensive = asyncio.create_task(pool.prepare(huge()))
        await until(lambda: held)
        with held_up(cheap):
            others = (asyncio.create_task(pool.prepare(pixels(seed))) for seed in range(3))
            jobs = [expensive, *others]
            await asked(pool, 4)
            pool.close()
            found = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(each, EngineClosed) for each in found)
    with pytest.raises(EngineClosed):
        await pool.prepare(pixels())
    await until(lambda: not decoders() & (cheap | held))
    pool.close()


async def test_pixels_that_wait_are_bounded(make_pool):
    """An image that need not wait is not counted, and one alone always may."""
    pool = make_pool(limits=ImageLimits(max_aspect_ratio=100), max_waiting_pixels=5000)
    cheap = await decoders_of(pool)
    with expensive_held_up(cheap) as held:
        running = asyncio.create_task(pool.prepare(huge()))
        await until(lambda: held)
        first = asyncio.create_task(pool.prepare(huge(1)))
        await until(lambda: pool.load.waiting_pixels)
        assert pool.load.waiting_pixels == 3_250_000, "more than the limit, but alone"
        with pytest.raises(PixelsWaiting, match="max_queued_pixels"):
            await pool.prepare(huge(2))
        await pool.prepare(png(1, 1))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pool.load.waiting_pixels == 0
    await running


_KILLED = """
import asyncio, sys
import numpy as np
from kestrel_engine.config.images import ImageLimits
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.processes.template import confined
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.skills.constraints.grammar_process import GrammarProcess
from kestrel_engine.types.constraint import Constraint

async def main():
    pool = PreprocessPool(1, ImageLimits(), VisionConfig())
    if sys.argv[1] != "loading":
        await pool.prepare(np.zeros((60, 60, 3), np.uint8))
        GrammarProcess().problem(Constraint("regex", "a"))
    children = open(f"/proc/{confined.pid}/task/{confined.pid}/children").read()
    print(confined.pid, children, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow_with("idle")
@pytest.mark.parametrize("state_of_it", ["loading", "idle", "busy"])
async def test_nothing_is_left_of_a_process_that_is_killed(state_of_it):
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, state_of_it], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == (1 if state_of_it == "loading" else 3)
        if state_of_it == "busy":  # They look at no line meanwhile.
            for pid in pids[1:]:
                os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        await until(lambda: not any(state(pid) not in ("", "Z") for pid in pids))


def test_a_decoder_has_neither_torch_nor_the_engine(make_pool):
    """What the template loads, all decoders have."""
    code = (
        "import sys, types; package = types.ModuleType('kestrel_engine'); package.__path__ = [sys.argv[1]];"
        "sys.modules['kestrel_engine'] = package; import kestrel_engine.processes.forking, os;"
        "import kestrel_engine.preprocess.processes.decoder as decoder; decoder.load();"
        "print(*sys.modules); print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "kestrel_engine")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    modules, threads = done.stdout.splitlines()
    assert not {"torch", "grpc", "asyncio", "kestrel_engine.engine"} & set(modules.split())
    assert threads == "1", "a process of several threads can't be forked safely"


def test_a_decoder_gets_no_more_memory_than_it_has_reserved():
    """The kernel refuses it, within the process that asks."""
    code = (
        "import numpy as np; from kestrel_engine.confinement.own_memory import open_count\n"
        "from kestrel_engine.preprocess.processes.decoder import memory_bound\n"
        "memory = open_count()\n"
        "with memory_bound(memory, 2**26): np.ones(2**25, np.uint8)\n"
        "try:\n"
        "    with memory_bound(memory, 2**26): np.ones(2**27, np.uint8)\n"
        "except MemoryError: print('refused')\n"
        "np.ones(2**27, np.uint8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "refused\n"


async def test_threads_of_this_process_do_no_decoding(make_pool):
    pool = make_pool()
    before = {thread.name for thread in threading.enumerate()}
    await pool.prepare(png(200, 150))
    assert {thread.name for thread in threading.enumerate()} == before
