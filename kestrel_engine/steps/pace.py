"""Pace: when decode steps beside new work are launched. Owns when the next one is due.

Fewer decode steps with more rows take less time from the new work. To launch a step with several images takes the host
some ten milliseconds, in which it can launch no decode step. So new work is launched soon after a decode step.
"""

from __future__ import annotations

from ..types.step import Lane, StepPlan

LOOK_S = 0.0005
"""Seconds between two looks whether new work has ended, while the next decode step is not due."""
MOST_OF_A_PACE = 0.75
"""A launch that takes longer than this share of the pace delays a decode step. Otherwise it would never begin."""
FORGETTING = 0.9
"""The longest launch counts less after each later one."""


class Pace:
    """``pace_s``: the least seconds between the launches of two decode steps beside new work; 0: none."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s, self._due_at, self._launch_s = pace_s, 0.0, 0.0

    @property
    def is_set(self) -> bool:
        return self._pace_s > 0

    def until_due(self, now: float) -> float:
        """Seconds until the next decode step is due, but no longer than until the next look; 0 if it is due."""
        return min(LOOK_S, max(0.0, self._due_at - now))

    def has_time(self, now: float) -> bool:
        """Whether the launch of a step with new work would end before the next decode step is due."""
        return now + min(self._launch_s, MOST_OF_A_PACE * self._pace_s) <= self._due_at

    def launched(self, plan: StepPlan, begun: float, ended: float) -> None:
        """Notes that the host launched a step between two instants."""
        if plan.lane is Lane.DECODE:
            self._due_at = begun + self._pace_s
        else:
            self._launch_s = max(ended - begun, FORGETTING * self._launch_s)
