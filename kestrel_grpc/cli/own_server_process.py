"""``python -m kestrel_grpc.cli.own_server_process FD FLAG…``: runs ``serve`` for a command, and ends when the command
ends.

FD is the read end of a pipe. The command holds the write end.
"""

from __future__ import annotations

import sys

from kestrel_engine import end_with_parent

from .program import main

if __name__ == "__main__":
    # kernel_signal requires that the command starts this process from its main thread, which it does.
    end_with_parent(int(sys.argv[1]), kernel_signal=True)
    sys.exit(main(["serve", *sys.argv[2:]]))
