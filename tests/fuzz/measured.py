"""The limits of an input: processor seconds and memory."""

import time
from collections.abc import Callable

MOST_S = 1.0
"""Processor seconds of an input."""
MOST_MIB = 3072
"""Resident memory of the process: the packages take a third."""


class TooSlow(AssertionError):
    """An input took too much processor time."""


def within_limits(take: Callable[[bytes], None], slowdown: float = 1) -> Callable[[bytes], None]:
    """``take`` that raises TooSlow for an input of over ``slowdown`` times MOST_S."""

    def measured(data: bytes) -> None:
        began = time.process_time()
        take(data)
        seconds = time.process_time() - began
        if seconds > slowdown * MOST_S:
            raise TooSlow(f"{seconds:.1f} s of processor time")

    return measured
