"""``python -m kestrel_grpc.workers SOCKET DEVICE``: starts the template of workers."""

from __future__ import annotations

import sys

from .template import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
