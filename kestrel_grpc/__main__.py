"""``kestrel-grpc`` and ``python -m kestrel_grpc``: see cli/parser.py."""

from __future__ import annotations

import sys

from .cli.parser import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
