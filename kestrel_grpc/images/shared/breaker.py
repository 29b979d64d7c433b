"""Breaker: after failures in a row, the shared store is left alone for a while, so that no call waits for it.

Then one operation tries the store. If it fails, the pause is twice as long.
"""

from __future__ import annotations

from kestrel_engine import clock

FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class Breaker:
    """Belongs to one event loop. Every ``enter`` that returns True is followed by ``succeeded``, ``failed`` or
    ``left``."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until: float | None = None
        self._tries = False

    @property
    def is_closed(self) -> bool:
        """Whether the store is used: it has not failed several times in a row."""
        return self._open_until is None

    def enter(self) -> bool:
        """Whether an operation may use the store now."""
        if self._open_until is None:
            return True
        if self._tries or clock.now() < self._open_until:
            return False
        self._tries = True
        return True

    def succeeded(self) -> None:
        self._num_failures, self._pause_s = 0, _FIRST_PAUSE_S
        self._open_until, self._tries = None, False

    def failed(self) -> None:
        self._num_failures += 1
        if self._tries:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif self._open_until is not None or self._num_failures < FAILURES:
            return
        self._open_until, self._tries = clock.now() + self._pause_s, False

    def left(self) -> None:
        """The operation ended without showing whether the store works."""
        self._tries = False
