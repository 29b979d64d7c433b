"""How Python's interpreter is set up in a process that serves."""

from __future__ import annotations

import gc
import sys

GC_THRESHOLDS = (50_000, 20, 100)
"""A step makes a handful of objects for every row and drops them two steps later. By Python's default of 700 the
collector runs several times a step at large batches, promotes what is about to die, and host time grows faster than
the batch: 3.1 against 1.9 ms at 512 rows (benchmarks.engine_host). Cycles are few, and still found."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it. Python's default of 5 ms is longer than a step
of a GPU: the step thread, which gives the interpreter up whenever it waits for the device, got it back too late."""


def set_up_interpreter() -> None:
    """To be called before the engine is made."""
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
