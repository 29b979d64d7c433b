"""LoadPolicy: how many servers the load needs. Ray Serve's controller asks it several times a second.

The controller gets this module by value, so it imports nothing of this package. It is pure: Ray passes the loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

UTILIZATION, QUEUE_WAIT_S, KV_USE = "utilization", "queue_wait_s", "kv_use"
"""The figures of each server's load, as Ray carries them."""
_TOLERANCE = 0.1
"""The load may differ from its target by this share before the number of servers changes."""


class LoadPolicy:
    """Targets are means over all servers.

    Utilization and KV use are shares of servers: twice the servers halve them, so their sums tell how many servers are
    enough. The wait in the queue tells only that there are too few. It doubles their number, once all that were wanted
    before serve.
    """

    def __init__(self, *, utilization: float, queue_wait_s: float, kv_use: float) -> None:
        self._shares = {UTILIZATION: utilization, KV_USE: kv_use}
        self._queue_wait_s = queue_wait_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """``context``: Ray's AutoscalingContext. Returns the number of servers, and no state for the next call.

        Ray waits until the load has asked for more or fewer servers for long enough, and keeps to the limits.
        """
        running = set(context.running_replicas)
        metrics = context.aggregated_metrics or {}
        found = {
            name: [value for replica, value in values.items() if replica in running]
            for name, values in metrics.items()
        }
        return self.wanted(found, context.target_num_replicas), {}

    def wanted(self, loads: Mapping[str, Sequence[float]], current: int) -> int:
        """The number of servers that ``loads``, the values of all that serve, need. ``current``: as many were wanted
        before. Without loads, ``current``."""
        serving = max(map(len, loads.values()), default=0)
        if not serving:
            return current
        needed = max(sum(loads.get(name, ())) / share for name, share in self._shares.items())
        waits = loads.get(QUEUE_WAIT_S, ())
        if waits and serving >= current and sum(waits) / len(waits) > self._queue_wait_s:
            needed = max(needed, 2.0 * current)
        if abs(needed - current) <= _TOLERANCE * current:
            return current
        return max(1, math.ceil(needed - _TOLERANCE))
