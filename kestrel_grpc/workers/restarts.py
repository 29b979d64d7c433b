"""When a worker that ended is started anew, and when that is given up. Pure; the time is the caller's."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0


class Restarts:
    """Of one worker. ``most`` of them within WINDOW_S, each after twice the pause of the one before."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start, for a worker that ended at ``now``; None: no more."""
        while self._at and self._at[0] <= now - WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self._most:
            return None
        self._at.append(now)
        # Bounded before it is a power: whoever allows thousands of restarts gets no overflow.
        return min(FIRST_DELAY_S * (1 << min(len(self._at) - 1, 16)), MOST_DELAY_S)
