"""Restarts: decides when to restart a worker that ended, and when to give up. A pure class; callers pass the time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0


class Restarts:
    """The restarts of one worker: at most ``most`` within WINDOW_S seconds, each after twice the previous delay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start of a worker that ended at ``now``; None if the limit is reached."""
        while self._at and self._at[0] <= now - WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self._most:
            return None
        self._at.append(now)
        # The exponent is limited, because thousands of restarts would overflow.
        return min(FIRST_DELAY_S * (1 << min(len(self._at) - 1, 16)), MOST_DELAY_S)
