"""Measures preprocessing: milliseconds for one image, and images a second for many.

python -m benchmarks.preprocess [--quick] [--json FILE]

The images are the first ones of the chart trace, of 850x600 pixels, which give 9 crops at Moondream's shapes. Eight
bytes after the end of an image make repeats differ, so that no cache finds them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess import crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.preprocess.decoding.open_image import begin_image, open_image
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.preprocess.prepared_cache import source_digest
from kestrel_engine.preprocess.processes.decoder import ImageDecoder
from kestrel_engine.types.model_config import VisionConfig

from .reports.program import Program
from .reports.report import Report, median
from .traffic.chart_trace import draw, shape_of

VISION, LIMITS = VisionConfig(), ImageLimits()
SHARES = (1, 2, 4, 8, 14)
RATE_LIMIT = 70.0
"""Images a second that one H200 can process."""

ONE_LIMIT_MS = 18.0
"""A request of 38 ms has about 20 ms of GPU work; this is the rest, in milliseconds."""

DEVICE_PIXELS = 2**24
"""The largest image whose crops the GPU makes."""


def new_images() -> Iterator[bytes]:
    """Yields the same image forever, each time with different bytes."""
    number = next(i for i in itertools.count() if shape_of(i).width == 850)
    image = draw(number)
    for count in itertools.count():
        yield image + count.to_bytes(8, "big")


def times(work: Callable[[], Any], count: int) -> tuple[float, float]:
    """Returns the median milliseconds of wall time and of CPU time."""
    wall, cpu = [], []
    for _ in range(count):
        began, spent = time.perf_counter(), time.process_time()
        work()
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - spent))
    return median(wall), median(cpu)


def measure_one(report: Report, count: int) -> None:
    """Measures the stages of preparing one image on an idle machine."""
    images = new_images()
    image = next(images)
    decoded = open_image(image, LIMITS)
    rows, columns = crops.select_tiling(decoded.width, decoded.height, VISION)
    stages: dict[str, Callable[[], Any]] = {
        "source digest": lambda: source_digest(image),
        "decode": lambda: open_image(image, LIMITS),
        "content key": lambda: crops.content_key(decoded, VISION),
    }
    for threads in SHARES:
        stages[f"tile and key, {threads} threads"] = _tiling(lambda: decoded, threads)
    for threads in SHARES:
        begin = partial(begin_image, image, LIMITS)
        stages[f"decode, tile and key, {threads} threads"] = _tiling(begin, threads)
    stages["decode and key, crops made on a device"] = lambda: crops.cut_crops(
        open_image(image, LIMITS), VISION, device_pixels=DEVICE_PIXELS
    )
    title = f"One image of {len(image)} bytes, {rows} x {columns} crops"
    for name, work in stages.items():
        wall, cpu = times(work, count)
        report.add(title, {"ms": wall, "cpu ms": cpu, "of": name})

    async def repeated(pool: PreprocessPool, fresh: bool) -> list[float]:
        found = []
        for _ in range(count):
            source = next(images) if fresh else image
            began = time.perf_counter()
            await pool.prepare(source)
            found.append(1e3 * (time.perf_counter() - began))
        return found

    async def through_pool() -> tuple[list[float], list[float]]:
        pool = PreprocessPool(_num_threads()[-1], LIMITS, VISION, cache_bytes=2**28)
        await pool.prepare(image)
        found = await repeated(pool, True), await repeated(pool, False)
        pool.close()
        return found

    fresh, again = asyncio.run(through_pool())
    report.add(title, {"ms": median(fresh), "cpu ms": "-", "of": "new, through the pool"})
    report.add(title, {"ms": median(again), "cpu ms": "-", "of": "repeat, through the pool"})
    report.bar("ms of one new image, on an idle machine", median(fresh), ONE_LIMIT_MS)


def _tiling(image: Callable[[], DecodedImage], threads: int) -> Callable[[], Any]:
    """Prepares an image in this process as a decoder does."""
    run = partial(ImageDecoder(LIMITS, VISION).split, threads=threads) if threads > 1 else None
    return lambda: crops.cut_crops(image(), VISION, run=run)


def measure_many(report: Report, seconds: float) -> None:
    """Prepares new images continuously, two more at a time than there are processes."""
    best = 0.0
    images = new_images()
    for processes in _num_threads():
        spent, began = time.process_time(), time.perf_counter()
        count = asyncio.run(_prepare(images, processes, seconds))
        rate = count / (time.perf_counter() - began)
        cpu_ms = 1e3 * (time.process_time() - spent) / max(1, count)
        row = {"processes": processes, "images/s": rate, "own cpu ms": cpu_ms}
        report.add("New images by processes", row)
        best = max(best, rate)
    report.bar("new images/s", best, RATE_LIMIT, at_least=True)


def _num_threads() -> list[int]:
    """Returns the thread counts to measure: up to the machine's cores less the two that the server uses itself."""
    most = max(2, (os.cpu_count() or 1) - 2)
    return [n for n in (1, 2, 4, 8) if n < most] + [most]


async def _prepare(images: Iterator[bytes], processes: int, seconds: float) -> int:
    """Returns the number of prepared images."""
    pool = PreprocessPool(processes, LIMITS, VISION)
    end, count = time.perf_counter() + seconds, 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await pool.prepare(next(images))
            count += 1

    await asyncio.gather(*(caller() for _ in range(processes + 2)))
    pool.close()
    return count


def main(arguments: Sequence[str] | None = None) -> Report:
    with Program("preprocess", __doc__).reporting(arguments) as (args, _, report):
        measure_one(report, 1 if args.quick else 30)
        measure_many(report, 0.1 if args.quick else 3.0)
    return report


if __name__ == "__main__":
    main()
