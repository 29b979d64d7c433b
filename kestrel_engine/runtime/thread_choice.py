"""The threads of torch's operators on a CPU, and the choice between one and all of them for decode passes.

Two idle cores read weights nearly twice as fast as one. Beside busy processes, threads wait for the one that has no
core, at more than a hundred barriers a pass. Then one thread is faster. The choice goes by the time that passes took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_before: list[int] = []
"""The numbers of threads that passes under way will restore."""


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Sets the number of threads of the operators that this thread runs."""
    with _lock:
        before = torch.get_num_threads()
        _before.append(before)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(before)
            _before.remove(before)


def forget_passes() -> None:
    """Gives a new thread the number of threads that holds outside of passes. torch gives it the number that any thread
    has set last, which may be that of another model's pass."""
    with _lock:
        torch.set_num_threads(max(_before, default=torch.get_num_threads()))


_MOST_PASSES = 128
"""The passes after which the other number of threads is tried again, if it was slower each time."""
_WEIGHT = 0.3
"""Of the newest pass in the mean time of a pass."""


class ThreadChoice:
    """The choice for passes of one number of rows. ``threads``: the alternative to one thread."""

    def __init__(self, threads: int) -> None:
        self._threads, self._other = threads, 1
        self._took: dict[int, float] = {}
        self._left = self._interval = 4

    def next(self) -> int:
        """Returns the number of threads for the next pass. `took` must follow."""
        return self._other if self._left == 0 else self._threads

    def took(self, seconds: float) -> None:
        """Notes the time of the pass for which `next` chose."""
        if self._left:
            self._left -= 1
            before = self._took.get(self._threads, seconds)
            self._took[self._threads] = before + _WEIGHT * (seconds - before)
            return
        if seconds < self._took[self._threads]:
            self._threads, self._other = self._other, self._threads
            self._took[self._threads] = seconds
            self._interval = 4
        else:
            self._interval = min(2 * self._interval, _MOST_PASSES)
        self._left = self._interval
