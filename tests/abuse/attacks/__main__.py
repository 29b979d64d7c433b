"""Attacks on a server on this machine, each bounded in count and time, while a polite caller uses the server.

    python -m tests.abuse.attacks                 # all, against a server of their own with default flags
    python -m tests.abuse.attacks bombs watchers  # some

For each it prints the most memory of the server's whole process tree above its memory at rest, what is still held after
10 s, and p50, p95 and p99 of the polite caller, who asks about a 640 x 480 JPEG as soon as the answer before is there.
Figures need an otherwise idle machine. Loopback only.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.abuse.attacks import ATTACKS, MIB, run
from tests.abuse.target import Polite, Target


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, Target(Path(folder)) as target:
        alone = Polite(target)
        alone.start()
        time.sleep(5)
        alone.stop()
        print(
            f"alone: {len(alone.seconds)} calls, p50 {alone.percentile(0.5):.2f} p95 {alone.percentile(0.95):.2f} "
            f"p99 {alone.percentile(0.99):.2f} s; {target.memory() / MIB:.0f} MiB",
            flush=True,
        )
        for name in names or ATTACKS:
            print(asyncio.run(run(target, name)), flush=True)
            if target.popen.poll() is not None:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
