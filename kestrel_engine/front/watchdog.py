"""Notices when the step thread dies or hangs, and shows where. Owns nothing but the waiting."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback

from ..errors import RuntimeFailure
from ..steps.loop import EngineLoop

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Most seconds between two looks: a dead engine is noticed within about a second."""


async def watch(loop: EngineLoop, limit_s: float) -> RuntimeFailure:
    """Returns what is wrong, once no step has ended for ``limit_s`` while there was work, or the thread is dead. The
    stacks of all threads are in the log by then."""
    while True:
        await asyncio.sleep(min(INTERVAL_S, limit_s / 4))
        stalled_s = loop.stalled_s
        if not loop.alive:
            failure = RuntimeFailure("the step thread died")
        elif stalled_s > limit_s:
            failure = RuntimeFailure(
                f"no step ended for {stalled_s:.1f} s, the limit is {limit_s:.1f} s"
            )
        else:
            continue
        log_stacks(str(failure))
        return failure


def log_stacks(reason: str) -> None:
    """Writes where every thread stands to the log."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            logger.error("%s; stack of thread %s:\n%s", reason, thread.name, stack)
