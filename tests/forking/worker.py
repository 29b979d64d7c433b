"""The interpreter of a pytest-xdist worker: python worker.py -u -c CODE runs CODE in a fork of the fork server.

The fork has imported torch and all else that takes seconds. This process only waits for it.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.forking.process import ForkedProcess

    with ForkedProcess([sys.executable, *sys.argv[2:]]) as worker:
        # Only the worker keeps these files, so that its end is the end of its output.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        return worker.wait()


if __name__ == "__main__":
    sys.exit(main())
