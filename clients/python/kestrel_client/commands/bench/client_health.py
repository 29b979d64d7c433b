"""ClientHealth: whether the client itself limits what it measures: its event loop's lag and its share of a core."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from .histogram import Histogram

_SAMPLE_S = 0.02
_CPU_SHARE = 0.85
"""Of one core. Python runs one thread at a time, so little is left above this."""
_LEAST_LAG_S = 0.01
_LAG_SHARE = 0.1
"""Lags below this part of the median time to the first token do not change the picture."""


@dataclass
class ClientHealth:
    """What the process measured of itself in the window of a stage. ``cpu_share``: CPU time divided by wall time."""

    lag: Histogram = field(default_factory=Histogram)
    """How late the event loop ran a timer."""
    cpu_share: float = 0.0

    def limits(self, lateness: Histogram, typical_s: float) -> list[str]:
        """Why the client may have limited the stage; empty if nothing shows that.

        ``lateness``: of the requests. ``typical_s``: the median time to the first token, or of an answer.
        """
        reasons = []
        if self.cpu_share >= _CPU_SHARE:
            reasons.append(f"the client used {self.cpu_share:.0%} of a core")
        allowed_s = max(_LEAST_LAG_S, _LAG_SHARE * typical_s)
        if (lag_s := self.lag.percentile(99)) > allowed_s:
            reasons.append(f"the client's event loop was {1e3 * lag_s:.0f} ms late (p99)")
        if (late_s := lateness.percentile(99)) > allowed_s:
            reasons.append(f"requests left {1e3 * late_s:.0f} ms after their time (p99)")
        return reasons


async def watch_health(until: float) -> ClientHealth:
    """Measures this process from now until an instant of the event loop's clock."""
    health, now = ClientHealth(), asyncio.get_running_loop().time
    began_at, began_cpu = time.monotonic(), time.process_time()
    while (due := min(now() + _SAMPLE_S, until)) > now():
        await asyncio.sleep(due - now())
        health.lag.record(now() - due)
    wall_s = max(time.monotonic() - began_at, 1e-9)
    health.cpu_share = (time.process_time() - began_cpu) / wall_s
    return health
