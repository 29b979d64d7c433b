"""The load report for balancers: xds.data.orca.v3.OrcaLoadReport, as gRFC A51 and xDS define it.

A report comes in the trailer of a call, or in the stream of services/load_reports.py.

This module encodes the message itself. It has seven fields of two types, which do not justify a dependency for stubs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from kestrel_engine import clock

from ..service_names import VISION_METHODS
from .load import Load

TRAILER = "endpoint-load-metrics-bin"

FRESH_S = 0.1
"""Seconds for which a report is sent again. Load balancers evaluate reports about once a second, and making a report
takes longer than all other work at the end of a call."""

_CPU, _MEMORY, _UTILIZATION, _RPS, _EPS, _NAMED, _APPLICATION = 1, 2, 5, 6, 7, 8, 9
"""Field numbers of the message."""


class LoadReports:
    """Makes the encoded reports of this server. A report is at most FRESH_S old. Runs on the event loop."""

    def __init__(self, read: Callable[[], Load]) -> None:
        self._read = read
        self._report = b""
        self._stale_at = clock.now()

    def current(self) -> bytes:
        now = clock.now()
        if now >= self._stale_at:
            self._report = load_report(self._read())
            self._stale_at = now + FRESH_S
        return self._report

    def trailer(self, method: str) -> tuple[tuple[str, bytes], ...]:
        """The trailer of a call. It is empty for methods of other services than VisionService, which cause no load."""
        if not method.startswith(VISION_METHODS):
            return ()
        return ((TRAILER, self.current()),)


def load_report(load: Load) -> bytes:
    """The encoded message. gRPC's C core passes it to load balancers, not to applications."""
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
    """An encoded double field; empty for 0, as in every proto3 message."""
    return struct.pack("<Bd", field << 3 | 1, value) if value else b""


def _map(field: int, values: Mapping[str, float]) -> bytes:
    entries = []
    for name, value in values.items():
        key = name.encode()
        entry = bytes((1 << 3 | 2, len(key))) + key + struct.pack("<Bd", 2 << 3 | 1, value)
        entries.append(bytes((field << 3 | 2, len(entry))) + entry)
    return b"".join(entries)
