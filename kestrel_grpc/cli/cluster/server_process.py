"""``python -m kestrel_grpc.cli.cluster.server_process FD FLAG…``: runs ``serve``, which drains when its parent ends.

FD is the read end of a pipe. The parent, a replica of Ray Serve, holds the write end. If the replica is killed, running
requests may end nevertheless.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from ..program import main


def _watch(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # With an empty mask, poll() reports a closed other end and no data.
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(
        target=_watch, args=(int(sys.argv[1]),), name="parent-watch", daemon=True
    ).start()
    sys.exit(main(["serve", *sys.argv[2:]]))
