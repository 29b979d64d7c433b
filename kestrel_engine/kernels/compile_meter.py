"""CompileMeter: what Triton compiled, and how long that took. Owns Triton's compilation listener, one for the process.

Kernels are compiled when they are first launched: while graphs are captured, while the engine warms up, and, for a
shape that nothing before has had, in the middle of serving, where all steps wait for it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from ..types.info import CompileCounts

logger = logging.getLogger(__name__)


class CompileMeter:
    """Any thread. ``serving`` True: a kernel that is compiled from now on is worth a warning."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CompileCounts()
        self.serving = False

    @property
    def counts(self) -> CompileCounts:
        return self._counts

    def note(self, name: str, seconds: float, *, cached: bool) -> None:
        """``cached``: it had been compiled by an earlier process."""
        with self._lock:
            before = self._counts
            self._counts = CompileCounts(
                compiled=before.compiled + (not cached),
                cached=before.cached + cached,
                seconds=before.seconds + seconds,
            )
        if self.serving and not cached:
            logger.warning("kernel %s was compiled while serving, in %.2f s", name, seconds)


_meter: CompileMeter | None = None


def watch_compiler() -> CompileMeter:
    """The process's meter, which listens from the first call on; whoever listened before goes on to."""
    global _meter
    if _meter is None:
        from triton import knobs

        _meter, before = CompileMeter(), knobs.compilation.listener
        knobs.compilation.listener = _listener(_meter, before)
    return _meter


def _listener(meter: CompileMeter, before: Any) -> Any:
    """Triton calls it with keywords only; its times are microseconds."""

    def listen(**told: Any) -> None:
        times = told["times"]
        spent = times.ir_initialization + times.total_lowering + times.store_results
        name = told["metadata"].get("name", "without a name")
        meter.note(name, spent / 1e6, cached=told["cache_hit"])
        if before is not None:
            before(**told)

    return listen
