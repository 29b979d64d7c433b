"""``python -m kestrel_grpc.workers FD INDEX``: the command with which the supervisor starts a worker."""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
