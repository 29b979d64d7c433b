"""EdgeCounts: what is open at the edge, and the limits. Metrics read it, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCounts:
    """By default nothing is known."""

    connections: Callable[[], int | None] = lambda: None
    """TCP connections; None where the system doesn't tell."""
    visits: Callable[[], int] = lambda: 0
    """Calls of health and reflection in progress."""
    max_connections: int | None = None
    max_streams: int | None = None
    """Of one connection."""
