"""The settings of Python's interpreter in a server process."""

from __future__ import annotations

import gc
import sys

GC_THRESHOLDS = (50_000, 20, 100)
"""A step creates a few objects for every row and drops them two steps later. With Python's default threshold of 700,
the collector runs several times per step at large batches and promotes objects that are about to be dropped. Host time
then grows faster than the batch: 3.1 instead of 1.9 ms at 512 rows (benchmarks.engine_host). The few cycles are still
collected."""

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may hold the interpreter lock while another thread waits for it. Python's default of 5 ms is
longer than a step of a GPU. The step thread releases the lock whenever it waits for the device, and would get it back
too late."""


def set_up_interpreter() -> None:
    """Sets the garbage collector's thresholds and the switch interval. Call this before the engine is created."""
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
