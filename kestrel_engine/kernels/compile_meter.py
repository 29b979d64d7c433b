"""CompileMeter: counts and times Triton's compilations. Owns Triton's compilation listener, of which a process has one.

A kernel is compiled at its first launch: during graph capture or warm-up, or, for a shape that was not used before,
while the engine serves. In that case all steps wait for the compilation.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakSet

from ..types.info import CompileCounts

logger = logging.getLogger(__name__)


class CompileMeter:
    """Thread-safe counters of compilations. A compilation in a thread that serves logs a warning, because requests wait
    for it. One in another thread does not: a model may be loaded while another one serves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CompileCounts()
        self._serving: WeakSet[threading.Thread] = WeakSet()

    def note_serving(self, thread: threading.Thread) -> None:
        """Notes that requests wait for what ``thread`` does from now on."""
        self._serving.add(thread)

    @property
    def counts(self) -> CompileCounts:
        return self._counts

    def note(self, name: str, seconds: float, *, cached: bool) -> None:
        """Counts a compilation in this thread. ``cached``: the kernel came from the cache of an earlier process."""
        with self._lock:
            before = self._counts
            self._counts = CompileCounts(
                compiled=before.compiled + (not cached),
                cached=before.cached + cached,
                seconds=before.seconds + seconds,
            )
        if not cached and threading.current_thread() in self._serving:
            logger.warning("kernel %s was compiled while serving, in %.2f s", name, seconds)


_meter: CompileMeter | None = None


def watch_compiler() -> CompileMeter:
    """Returns the meter of the process, which listens from the first call on. An earlier listener stays active."""
    global _meter
    if _meter is None:
        from triton import knobs

        _meter, before = CompileMeter(), knobs.compilation.listener
        knobs.compilation.listener = _listener(_meter, before)
    return _meter


def _listener(meter: CompileMeter, before: Any) -> Any:
    """Returns a listener for Triton, which calls it with keyword arguments only, and with times in microseconds."""

    def listen(**event: Any) -> None:
        times = event["times"]
        spent = times.ir_initialization + times.total_lowering + times.store_results
        name = event["metadata"].get("name", "without a name")
        meter.note(name, spent / 1e6, cached=event["cache_hit"])
        if before is not None:
            before(**event)

    return listen
