"""Measures a process's CPU time between two instants, by thread. Owns the names of the threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

NAMES = {
    "MainThread": "event loop",
    "kestrel-steps": "steps",
    "kestrel-delivery": "delivery",
    "kestrel-canned": "fake engine",
}
"""The threads of a server that are reported separately. All other threads belong to gRPC and to the pool."""

OTHERS = "others"


@dataclass
class Window:
    """The time from one full step to a later one: seconds of wall time, and of CPU time by thread name."""

    steps: int
    wall_s: float
    cpu_s: float
    by_thread: dict[str, float]
    late_s: list[float]
    """From the end of each step to the step thread's return: the sleep's own delay and the wait for the interpreter."""
    host_s: list[float]
    """From that return to the end of the next launch: the step thread's work, and its waits on the way."""


@dataclass
class Snapshot:
    """``step``: how many full steps there were so far; seconds."""

    step: int
    wall: float
    cpu: float
    by_thread: dict[str, float] = field(default_factory=dict)


@dataclass
class WindowKeeper:
    """``note`` after every full step: the window runs from the ``warm_up``-th of these to the latest that ends ten.

    Only one thread may call ``note``.
    """

    warm_up: int = 20
    late_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    _full: int = 0
    _first: Snapshot | None = None
    _last: Snapshot | None = None

    def note(self) -> None:
        self._full += 1
        if self._full == self.warm_up:
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
            by_thread={n: s - first.by_thread.get(n, 0.0) for n, s in last.by_thread.items()},
            late_s=self.late_s,
            host_s=self.host_s,
        )


def snapshot(step: int = 0) -> Snapshot:
    by_thread: dict[str, float] = {}
    for thread in threading.enumerate():
        name = NAMES.get(thread.name)
        if name is not None and thread.ident is not None and thread.is_alive():
            clock = time.pthread_getcpuclockid(thread.ident)
            by_thread[name] = by_thread.get(name, 0.0) + time.clock_gettime(clock)
    cpu = time.process_time()
    by_thread[OTHERS] = cpu - sum(by_thread.values())
    return Snapshot(step, time.perf_counter(), cpu, by_thread)
