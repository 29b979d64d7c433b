"""The clock of engine and service: what time it is, and how long a thread sleeps or waits.

Callers write ``clock.now()`` and never keep the function, so that they follow the clock that is installed. By default
the functions are those of the system, without a layer between. A test installs another clock (tests/clock.py). The
timers of asyncio go by the time of their event loop, for which a test has a loop of its own. Child processes go by the
system's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

now: Callable[[], float] = time.monotonic
"""Returns the seconds of a clock that is never set back. Its zero has no meaning."""

wall: Callable[[], float] = time.time
"""Returns the seconds since 1970."""

sleep: Callable[[float], None] = time.sleep
"""Blocks the thread for so many seconds."""

wait: Callable[[threading.Event, float], bool] = threading.Event.wait
"""Blocks the thread until the event is set, at most so many seconds. Returns whether it is set."""


def _get(items: SimpleQueue[Any], timeout_s: float | None) -> Any:
    return items.get(timeout=timeout_s)


get: Callable[[SimpleQueue[Any], float | None], Any] = _get
"""Takes the next item of a queue. Blocks the thread until there is one, at most so many seconds if they are given.
Raises queue.Empty after them."""


@contextmanager
def installed(**functions: Callable[..., Any]) -> Iterator[None]:
    """Puts ``functions`` in the place of those of the same names, in this process, until the block ends."""
    module = globals()
    before = {name: module[name] for name in functions}
    module.update(functions)
    try:
        yield
    finally:
        module.update(before)
