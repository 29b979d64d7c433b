"""The one line on standard output, that a server is ready. Programs that start servers read it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def say_ready(served: str, addresses: Sequence[str], load_s: float) -> None:
    """``served``: what, where, in few words."""
    line = (
        f"kestrel-grpc ready: {served}, listening on {', '.join(addresses)}, "
        f"loaded in {load_s:.1f} s\n"
    )
    # A thread that nobody waits for: a pipe that nobody reads may be full.
    threading.Thread(target=_say, args=(line,), name="kestrel-ready", daemon=True).start()


def _say(text: str) -> None:
    """On standard output, but for its buffer: what stays there would fail once more at the end, and change the exit
    status."""
    try:
        os.write(sys.stdout.fileno(), text.encode())
    except OSError as error:  # A full disk, or nobody who reads: no reason not to serve.
        logger.warning("can't write the ready line: %s", error.strerror)
