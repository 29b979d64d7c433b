"""Restarts: decides when to restart a worker that ended, and when to give up. A pure class; callers pass the time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0


class WorkersError(Exception):
    """Workers, or their front, cannot be started or kept running. The message is one line."""


class Restarts:
    """The restarts of one worker: at most ``most`` within WINDOW_S seconds, each after twice the previous delay."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._at: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start of a worker that ended at ``now``; None if the limit is reached."""
        while self._at and self._at[0] <= now - WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self.most:
            return None
        self._at.append(now)
        # The exponent is limited, because thousands of restarts would overflow.
        return min(FIRST_DELAY_S * (1 << min(len(self._at) - 1, 16)), MOST_DELAY_S)


def gave_up(name: str, restarts: Restarts, how: str) -> str:
    """The message when ``name`` is not started again. ``how``: the way in which it ended the last time."""
    return f"{name} ended {restarts.most + 1} times within {WINDOW_S / 60:g} minutes; the last time: {how}"
