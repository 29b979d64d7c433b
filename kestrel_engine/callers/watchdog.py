"""Detects a step thread that is dead or hangs, and logs all stacks. Owns no state."""

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
"""Most seconds between two checks: a dead engine is detected within about a second."""


async def watch(loop: EngineLoop, limit_s: float) -> RuntimeFailure:
    """Returns the failure, and logs all stacks, once the thread is dead or no step has ended for ``limit_s`` seconds
    while there was work."""
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
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident])).rstrip()
            message, names = "%s; stack of thread %s:", (reason, thread.name)
            # As ``stack_info``, which formatters write below the record.
            logger.handle(
                logger.makeRecord(
                    logger.name, logging.ERROR, __file__, 0, message, names, None, sinfo=stack
                )
            )
