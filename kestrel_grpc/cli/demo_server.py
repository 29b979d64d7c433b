"""``python -m kestrel_grpc.cli.demo_server FD FLAG…``: ``serve`` for ``demo``, which ends when ``demo`` has ended.

FD is the read end of a pipe whose other end ``demo`` holds.
"""

from __future__ import annotations

import sys

from kestrel_engine import end_with_parent

from .parser import main

if __name__ == "__main__":
    # demo starts it from its main thread, as kernel_signal asks for.
    end_with_parent(int(sys.argv[1]), kernel_signal=True)
    sys.exit(main(["serve", *sys.argv[2:]]))
