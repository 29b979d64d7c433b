"""Chooses between one thread and all threads for decode passes on a CPU, by the time that such passes took.

Two idle cores read weights nearly twice as fast as one. Beside busy processes, threads wait for the one that has no
core, at more than a hundred barriers a pass. Then one thread is faster.
"""

from __future__ import annotations

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
