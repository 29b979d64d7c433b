"""``killed_until_done``: a command that is killed at random instants and started again, until it ends by itself,
with status 0."""

import asyncio
import random
import signal
import time
from pathlib import Path

from tests.forking.process import ForkedProcess


async def killed_until_done(command: list[str], written: Path, seed: int, most: int) -> int:
    """Returns how often it was killed, at most ``most`` times, mostly after ``written`` has grown."""
    rng, killed = random.Random(seed), 0
    while True:
        process = ForkedProcess(command)
        # Long enough for some results, and short enough for some kills before the first.
        until = time.monotonic() + rng.uniform(0.0, 0.2)
        before = written.stat().st_size if written.exists() else 0
        while killed < most and process.poll() is None:
            await asyncio.sleep(0.005)
            grown = written.exists() and written.stat().st_size > before
            if time.monotonic() > until and (grown or rng.random() < 0.1):
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
        status = await asyncio.to_thread(process.wait, 60)
        if status != -signal.SIGKILL:
            assert status == 0
            return killed
