"""``python -m kestrel_grpc.workers FD INDEX``: a worker, as the supervisor of ``kestrel-grpc serve`` starts it."""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
