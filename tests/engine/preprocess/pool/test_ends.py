"""Decoders: what they may load and hold, and what is left when one of them, a job, the pool or the program ends."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from kestrel_engine.errors import (
    EngineClosed,
    EngineOverloaded,
    ImageDecodeError,
    ImageTooSlowError,
)
from kestrel_engine.processes.template import confined
from tests.engine.preprocess.decoders import decoders, held_up, state
from tests.engine.preprocess.pool.conftest import (
    asked,
    decoders_of,
    expensive_held_up,
    huge,
    pixels,
    png,
)
from tests.forking.process import ForkedProcess, run_forked
from tests.waiting import until

ROOT = Path(__file__).parents[4]


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


@pytest.mark.slow
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


_KILLED = """
import asyncio, sys
import numpy as np
from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.processes.template import confined
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.skills.constraints.grammar_process import GrammarProcess
from kestrel_engine.types.constraint import Constraint

async def main():
    pool = PreprocessPool(1, ImageLimits(), VisionConfig())
    if sys.argv[1] != "loading":
        await pool.prepare(np.zeros((60, 60, 3), np.uint8))
        grammar = GrammarProcess()  # The process ends with it.
        grammar.problem(Constraint("regex", "a"))
    children = open(f"/proc/{confined.pid}/task/{confined.pid}/children").read()
    print(confined.pid, children, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow_with("idle")
@pytest.mark.parametrize("state_of_it", ["loading", "idle", "busy"])
async def test_nothing_is_left_of_a_process_that_is_killed(state_of_it):
    with ForkedProcess(
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
    done = run_forked([sys.executable, "-c", code], text=True)
    assert done.stdout == "refused\n"
