"""EdgeCounts: the numbers of open connections and calls, and their limits. Metrics read them from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCounts:
    """The defaults report nothing."""

    connections: Callable[[], int | None] = lambda: None
    """Number of TCP connections; None if the system does not report it."""
    ended: Callable[[], Mapping[str, int]] = dict
    """Number of connections that the server ended, by reason."""
    visits: Callable[[], int] = lambda: 0
    """Number of calls of health and reflection in progress."""
    max_connections: int | None = None
    max_streams: int | None = None
    """Limit on the calls of one connection."""
