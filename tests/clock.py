"""The clocks of tests, installed as kestrel_engine.clock, and as the time of the event loop that runs.

A still clock moves only when the test moves it. An event loop that has nothing to do moves it to the next timer, so a
test with time-outs of an hour takes milliseconds. A moved clock runs with that of the system, and a test moves it
forward: for tests with threads, sockets and other processes, whose work takes time that no test knows.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from kestrel_engine import clock

STARTED = 1_000_000.0
"""What a still clock shows at first. Differences of its instants are exact to 1e-9 s or better."""
_WALL = 1.8e9 - STARTED
_LOOK_S = 0.01
"""Seconds of the system's clock after which a thread that waits looks at a moved clock again."""


class StillClock:
    """Time stands still. A sleep moves it, so only one thread may sleep or wait."""

    def __init__(self) -> None:
        self._now = STARTED

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return _WALL + self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        assert seconds >= 0, seconds
        self._now += seconds

    sleep = advance

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()

    def get(self, items: SimpleQueue[Any], timeout_s: float | None) -> Any:
        try:
            return items.get_nowait()
        except Empty:
            assert timeout_s is not None, "nothing would end the wait"
            self.advance(timeout_s)
            return items.get_nowait()


class MovedClock:
    """The system's clock, and what the test has added to it."""

    def __init__(self) -> None:
        self._added = 0.0
        self._moved = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        return time.monotonic() + self._added

    def wall(self) -> float:
        return time.time() + self._added

    def advance(self, seconds: float) -> None:
        """Moves the clock forward. Any thread. What waited for an instant before then goes on."""
        with self._moved:
            self._added += seconds
            self._moved.notify_all()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: None)  # So that it looks at its timers.

    def sleep(self, seconds: float) -> None:
        until = self.now() + seconds
        with self._moved:
            while (left := until - self.now()) > 0:
                self._moved.wait(left)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        until = self.now() + timeout_s
        while not event.wait(min(_LOOK_S, max(0.0, until - self.now()))):
            if self.now() >= until:
                return event.is_set()
        return True

    def get(self, items: SimpleQueue[Any], timeout_s: float | None) -> Any:
        until = None if timeout_s is None else self.now() + timeout_s
        while until is not None and (left := until - self.now()) > 0:
            try:
                return items.get(timeout=min(_LOOK_S, left))
            except Empty:
                continue
        return items.get(block=until is None)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes this the time of ``loop``."""
        self._loop, loop.time = loop, self.now  # type: ignore[method-assign]


class Jumps:
    """Takes the place of the selector of an event loop. When the loop would wait for a timer, moves ``still`` to it.

    Threads of an executor, and files that the loop watches, may wake the loop: while there are any, it waits for them
    and time stands still. A test that starts other threads or processes uses a moved clock.
    """

    def __init__(self, loop: asyncio.SelectorEventLoop, still: StillClock) -> None:
        self._own: selectors.BaseSelector = loop._selector  # type: ignore[attr-defined]
        self._still = still
        self._num_in_threads = 0
        self._own_files = len(self._own.get_map())
        self._run_in_executor = loop.run_in_executor
        loop._selector = self  # type: ignore[attr-defined]
        loop.time = still.now  # type: ignore[method-assign]
        loop.run_in_executor = self._in_executor  # type: ignore[method-assign]
        self._shut_down = loop.shutdown_default_executor
        loop.shutdown_default_executor = self._without_executor  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def select(self, timeout: float | None = None) -> list[Any]:
        found = self._own.select(0)
        if found or timeout == 0:
            return found
        if self._num_in_threads or len(self._own.get_map()) > self._own_files:
            return self._own.select(None)
        assert timeout is not None, "the event loop waits for nothing that could come"
        self._still.advance(timeout)
        return []

    def _in_executor(self, executor: Executor | None, work: Any, *arguments: Any) -> Any:
        future = self._run_in_executor(executor, work, *arguments)
        self._num_in_threads += 1
        future.add_done_callback(self._left)
        return future

    async def _without_executor(self, *timeout: float) -> None:
        self._num_in_threads += 1  # The loop waits in a thread for the others.
        await self._shut_down(*timeout)
        self._num_in_threads -= 1

    def _left(self, _: object) -> None:
        self._num_in_threads -= 1


@contextmanager
def _installed(own: StillClock | MovedClock) -> Iterator[None]:
    with clock.installed(now=own.now, wall=own.wall, sleep=own.sleep, wait=own.wait, get=own.get):
        yield


@contextmanager
def still() -> Iterator[StillClock]:
    """Installs a still clock. An event loop that runs now goes by it until it is closed."""
    own = StillClock()
    if isinstance(loop := _running(), asyncio.SelectorEventLoop):
        Jumps(loop, own)
    with _installed(own):
        yield own


@contextmanager
def moved() -> Iterator[MovedClock]:
    """Installs a moved clock. An event loop that runs now goes by it until it is closed."""
    own = MovedClock()
    if (loop := _running()) is not None:
        own.follow(loop)
    with _installed(own):
        yield own


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
