"""Measures a process's CPU time between two instants, and the share of the canned engine's thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

ENGINE_THREAD = "kestrel-canned"
WARM_UP_STEPS = 20


@dataclass
class Window:
    """The time from one full step to a later one: seconds of CPU time, and of the canned engine's thread in it."""

    steps: int
    wall_s: float
    cpu_s: float
    engine_s: float


@dataclass
class Snapshot:
    """``step``: how many full steps there were so far; seconds."""

    step: int
    wall: float
    cpu: float
    engine: float


class WindowKeeper:
    """``note`` after every full step: the window runs from the ``WARM_UP_STEPS``-th to the latest that ends ten.

    Only one thread may call ``note``.
    """

    def __init__(self) -> None:
        self._full = 0
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None

    def note(self) -> None:
        self._full += 1
        if self._full == WARM_UP_STEPS:
            self._first = snapshot(self._full)
        elif self._full % 10 == 0 and self._first is not None:
            self._last = snapshot(self._full)

    def window(self) -> Window:
        """Raises RuntimeError if the batch was never full for long enough."""
        first, last = self._first, self._last
        if first is None or last is None or last.step <= first.step:
            raise RuntimeError("the batch was never full: ask for more tokens")
        return Window(
            steps=last.step - first.step,
            wall_s=last.wall - first.wall,
            cpu_s=last.cpu - first.cpu,
            engine_s=last.engine - first.engine,
        )


def snapshot(step: int = 0) -> Snapshot:
    engine = 0.0
    for thread in threading.enumerate():
        if thread.name == ENGINE_THREAD and thread.ident is not None and thread.is_alive():
            engine += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return Snapshot(step, time.perf_counter(), time.process_time(), engine)
