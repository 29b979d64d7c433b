"""ClientHealth: whether the client itself limits what it measures: its event loop's lag and its share of a core."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..histogram import Histogram

_SAMPLE_S = 0.02
_CPU_SHARE = 0.85
"""Of one core. Python runs one thread at a time, so little is left above this."""
_LEAST_LAG_S = 0.01
_LAG_SHARE = 0.1
"""Lags below this part of the median time to the first token do not change the picture."""
_BUSY = 0.97
_TAKEN_SHARE = 0.1
"""Of the cores of a busy machine that the server shares: what the client uses, the server lacks."""


@dataclass
class ClientHealth:
    """What one process, or several together, measured of themselves in the window of a stage."""

    lag: Histogram = field(default_factory=Histogram)
    """How late the event loop ran a timer."""
    cpu_shares: list[float] = field(default_factory=list)
    """CPU time divided by wall time, of each process."""
    machine_busy: float | None = None
    """The share of the machine's cores that worked, by any process; None where the system does not say."""

    def merge(self, other: ClientHealth) -> None:
        self.lag.merge(other.lag)
        self.cpu_shares += other.cpu_shares
        known = [s for s in (self.machine_busy, other.machine_busy) if s is not None]
        self.machine_busy = max(known, default=None)

    def limits(self, lateness: Histogram, typical_s: float, *, shared: bool) -> list[str]:
        """Why the client may have limited the stage; empty if nothing shows that.

        ``lateness``: of the requests. ``typical_s``: the median time to the first token, or of an answer. ``shared``:
        whether the server is on this machine.
        """
        reasons = []
        if (most := max(self.cpu_shares, default=0.0)) >= _CPU_SHARE:
            reasons.append(f"a client process used {most:.0%} of a core")
        allowed_s = max(_LEAST_LAG_S, _LAG_SHARE * typical_s)
        if (lag_s := self.lag.percentile(99)) > allowed_s:
            reasons.append(f"the client's event loop was {1e3 * lag_s:.0f} ms late (p99)")
        if (late_s := lateness.percentile(99)) > allowed_s:
            reasons.append(f"requests left {1e3 * late_s:.0f} ms after their time (p99)")
        taken = sum(self.cpu_shares) / (os.cpu_count() or 1)
        if shared and (self.machine_busy or 0.0) >= _BUSY and taken >= _TAKEN_SHARE:
            reasons.append(
                f"client and server share this machine: its cores were {self.machine_busy:.0%} busy, {taken:.0%} with "
                "the client"
            )
        return reasons


async def watch_health(until: float) -> ClientHealth:
    """Measures this process from now until an instant of the event loop's clock."""
    health, now = ClientHealth(), asyncio.get_running_loop().time
    began_at, began_cpu, began_machine = time.monotonic(), time.process_time(), _machine_times()
    while (due := min(now() + _SAMPLE_S, until)) > now():
        await asyncio.sleep(due - now())
        health.lag.record(now() - due)
    wall_s = max(time.monotonic() - began_at, 1e-9)
    health.cpu_shares.append((time.process_time() - began_cpu) / wall_s)
    machine = _machine_times()
    if began_machine is not None and machine is not None and machine[1] > began_machine[1]:
        health.machine_busy = (machine[0] - began_machine[0]) / (machine[1] - began_machine[1])
    return health


def _machine_times() -> tuple[int, int] | None:
    """Ticks that all cores worked, and all ticks; None on other systems than Linux."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ticks = [int(word) for word in words]
    except (OSError, ValueError):
        return None
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)
