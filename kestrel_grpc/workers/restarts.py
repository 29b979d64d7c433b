"""Restarts: decides when to restart a worker that ended, and when to give up. A pure class; callers pass the time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
CALM_S = 10.0
"""A process that has run for so long was no failed start. If it ends, the delay is the first again."""


class WorkersError(Exception):
    """Workers, or their front, cannot be started or kept running. The message is one line."""


class Restarts:
    """The restarts of one worker: at most ``most`` within WINDOW_S seconds. Of those that follow each other closely,
    each comes after twice the delay of the one before."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._at: deque[float] = deque()
        self._next_delay_s = FIRST_DELAY_S
        self._calm_at = 0.0
        """When the process has run for CALM_S."""

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start of a worker that ended at ``now``; None if the limit is reached."""
        while self._at and self._at[0] <= now - WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self.most:
            return None
        self._at.append(now)
        delay_s = FIRST_DELAY_S if now >= self._calm_at else self._next_delay_s
        self._next_delay_s = min(2 * delay_s, MOST_DELAY_S)
        self._calm_at = now + delay_s + CALM_S
        return delay_s


def gave_up(name: str, restarts: Restarts, how: str) -> str:
    """The message when ``name`` is not started again. ``how``: the way in which it ended the last time."""
    return f"{name} ended {restarts.most + 1} times within {WINDOW_S / 60:g} minutes; the last time: {how}"
