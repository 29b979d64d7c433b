"""The clocks of tests move when they should, and only then."""

import asyncio
import threading
from queue import Empty, SimpleQueue

import pytest

from kestrel_engine import clock
from tests.clock import moved, still


async def test_an_event_loop_without_work_jumps_to_its_next_timer(still_clock):
    began, seen = clock.now(), []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        seen.append(clock.now() - began)

    async with asyncio.TaskGroup() as group:
        for hours in (3, 1, 2):
            group.create_task(sleeper(3600 * hours))
    assert seen == pytest.approx([3600, 7200, 10800])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(86_400):
            await asyncio.Event().wait()
    assert clock.wall() - 1.8e9 == pytest.approx(10_800 + 86_400)


async def test_it_does_not_jump_while_a_thread_works_for_it(still_clock):
    began, opened = clock.now(), threading.Event()
    ended = asyncio.create_task(asyncio.to_thread(opened.wait, 60))
    timer = asyncio.create_task(asyncio.sleep(1000))
    asyncio.get_running_loop().call_soon(threading.Timer(0.05, opened.set).start)
    assert await ended, "set from outside"
    assert clock.now() == began
    await timer
    assert clock.now() - began == pytest.approx(1000)


async def test_it_says_that_nothing_can_come():
    def main():
        async def hang():
            with still():
                await asyncio.Event().wait()

        asyncio.run(hang())

    with pytest.raises(AssertionError, match="nothing that could come"):
        await asyncio.to_thread(main)


def test_sleeps_and_waits_move_a_still_clock(still_clock):
    began, event, items = clock.now(), threading.Event(), SimpleQueue[int]()
    clock.sleep(5)
    assert not clock.wait(event, 10)
    with pytest.raises(Empty):
        clock.get(items, 20)
    assert clock.now() - began == 35
    event.set()
    items.put(1)
    assert clock.wait(event, 10) and clock.get(items, 20) == clock.get(_with(2), None) - 1 == 1
    assert clock.now() - began == 35


def _with(item):
    items = SimpleQueue[int]()
    items.put(item)
    return items


async def test_threads_and_timers_go_on_when_the_clock_is_moved(moved_clock):
    """Each of them would wait for an hour."""
    event, items = threading.Event(), SimpleQueue[int]()
    waits = [
        asyncio.to_thread(clock.sleep, 3600),
        asyncio.to_thread(clock.wait, event, 3600),
        asyncio.to_thread(_got, items),
        asyncio.sleep(3600),
    ]
    tasks = [asyncio.ensure_future(each) for each in waits]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    moved_clock.advance(3600)
    assert await asyncio.gather(*tasks) == [None, False, "empty", None]


def _got(items):
    try:
        return clock.get(items, 3600)
    except Empty:
        return "empty"


def test_the_clock_before_comes_back():
    before = clock.now, clock.wall, clock.sleep, clock.wait, clock.get
    with moved(), still():
        pass
    assert (clock.now, clock.wall, clock.sleep, clock.wait, clock.get) == before
