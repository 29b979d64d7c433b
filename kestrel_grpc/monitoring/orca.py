"""The load report of a call's trailer, as gRFC A51 and the xDS interface define it (xds.data.orca.v3.OrcaLoadReport).

Owns its encoding, six fields of two shapes, so no stubs of a package that few have; and how old a report may be.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping

from .load import Load

TRAILER = "endpoint-load-metrics-bin"

FRESH_S = 0.1
"""Balancers look at reports every second or so; reading the load and telling it takes longer than the rest of a call's
end."""

_CPU, _MEMORY, _UTILIZATION, _RPS, _EPS, _NAMED, _APPLICATION = 1, 2, 5, 6, 7, 8, 9
"""Numbers of the message's fields."""


class LoadTrailer:
    """The trailer of calls of ``service``, the report within at most FRESH_S old. For the event loop."""

    def __init__(
        self,
        read: Callable[[], Load],
        service: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._methods = f"/{service}/"
        self._trailer: tuple[tuple[str, bytes], ...] = ()
        self._stale_at = clock()

    def __call__(self, method: str) -> tuple[tuple[str, bytes], ...]:
        """Empty for methods of other services, which do not make the server busy."""
        if not method.startswith(self._methods):
            return ()
        now = self._clock()
        if now >= self._stale_at:
            self._trailer = ((TRAILER, load_report(self._read())),)
            self._stale_at = now + FRESH_S
        return self._trailer


def load_report(load: Load) -> bytes:
    """The encoded message. gRPC's C core keeps it from applications: only their balancers read it."""
    named = {
        "running_requests": load.stats.running,
        "waiting_requests": load.waiting,
        "kv_cache_pages": load.stats.pages_total,
        "kv_cache_free_pages": load.stats.pages_free,
        "prefix_hit_rate": load.stats.prefix_hit_rate,
        "output_tokens_per_second": load.tokens_per_s,
    }
    return b"".join(
        (
            _double(_CPU, load.cpu),
            _double(_MEMORY, load.memory),
            _map(_UTILIZATION, {"kv_cache": load.kv_use}),
            _double(_RPS, load.requests_per_s),
            _double(_EPS, load.errors_per_s),
            _map(_NAMED, named),
            _double(_APPLICATION, load.utilization),
        )
    )


def _double(field: int, value: float) -> bytes:
    """Absent if it is 0, as in any proto3 message."""
    return struct.pack("<Bd", field << 3 | 1, value) if value else b""


def _map(field: int, values: Mapping[str, float]) -> bytes:
    entries = []
    for name, value in values.items():
        key = name.encode()
        entry = bytes((1 << 3 | 2, len(key))) + key + struct.pack("<Bd", 2 << 3 | 1, value)
        entries.append(bytes((field << 3 | 2, len(entry))) + entry)
    return b"".join(entries)
