"""Who is served first, beside whom, and how much may wait."""

import asyncio

import pytest

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import EngineClosed, ImageTooLargeError, PixelsWaiting
from tests.engine.preprocess.decoders import decoders, held_up, state
from tests.engine.preprocess.pool.conftest import (
    asked,
    decoders_of,
    expensive_held_up,
    huge,
    pixels,
    png,
)
from tests.waiting import until


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
