"""The images and pools of these tests, and how they hold a pool's decoders up."""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import pyvips

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.pool import EXPENSIVE_NICE, PreprocessPool
from kestrel_engine.preprocess.processes.decoder_process import DecoderProcess
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.decoders import decoders, nice_of
from tests.engine.preprocess.encoded import encoded
from tests.waiting import until, wait_until

LIMITS, VISION = ImageLimits(), VisionConfig()

NICE = min(19, nice_of(os.getpid()) + EXPENSIVE_NICE)
"""Of a process that decodes an expensive image: above the niceness of the tests."""


def pixels(seed: int = 0, height: int = 90, width: int = 120) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(width: int = 120, height: int = 90, seed: int = 0) -> bytes:
    return encoded(pixels(seed, height, width))


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
