"""``kestrel-grpc`` and ``python -m kestrel_grpc``: see cli/program.py."""

from __future__ import annotations

import sys

from .cli.program import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
