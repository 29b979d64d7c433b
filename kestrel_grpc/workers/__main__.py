"""``python -m kestrel_grpc.workers FD INDEX``: a worker of ``kestrel-grpc serve --workers``, started by the supervisor."""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
