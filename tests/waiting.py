"""How a test waits for what another thread or process does: by looking, with one bound that no verdict depends on."""

import asyncio
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

WITHIN_S = 60.0
"""Seconds after which what a test waits for is held to come never, however busy the machine."""


def _pauses_s() -> Iterator[float]:
    """Seconds between looks, which become rarer after a fifth of a second."""
    return itertools.chain(itertools.repeat(0.005, 40), itertools.repeat(0.025))


async def until(condition: Callable[[], Any], seen: Callable[[], Any] | None = None) -> Any:
    """Waits until ``condition()`` is true, or what it returns, if that is awaitable. Returns that value.

    Raises AssertionError with the condition's source after WITHIN_S, and with what ``seen()`` returns.
    """
    end = time.monotonic() + WITHIN_S
    for pause_s in _pauses_s():
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(_missing(condition, seen))
        await asyncio.sleep(pause_s)


def wait_until(condition: Callable[[], Any], seen: Callable[[], Any] | None = None) -> Any:
    """``until`` for tests that run no event loop: the thread sleeps between looks."""
    end = time.monotonic() + WITHIN_S
    for pause_s in _pauses_s():
        if value := condition():
            return value
        if time.monotonic() > end:
            raise AssertionError(_missing(condition, seen))
        time.sleep(pause_s)


T = TypeVar("T")


async def outlived(
    ask: Callable[[float], Awaitable[T]], begun: Callable[[T], bool], first_s: float = 0.1
) -> T:
    """What ``await ask(deadline_s)`` returns, where ``begun`` is true of it.

    A busy machine may let a short deadline pass before what is tested begins. Then ``ask`` gets a longer one.
    """
    deadline_s = first_s
    while not begun(ended := await ask(deadline_s)):
        assert deadline_s < WITHIN_S, f"not begun within {deadline_s:g} s: {ended}"
        deadline_s *= 4
    return ended


def _missing(condition: Callable[[], Any], seen: Callable[[], Any] | None) -> str:
    try:
        source = inspect.getsource(condition).strip()
    except (OSError, TypeError):
        source = repr(condition)
    found = "" if seen is None else f"\nSeen: {seen()!r}"
    return f"not so within {WITHIN_S:g} s: {source}{found}"
