"""Prints the line that reports that a server is ready. Programs that start servers read it from standard output."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def print_ready(served: str, addresses: Sequence[str], load_s: float) -> None:
    """Prints the ready line. ``served``: model and device. ``load_s``: seconds that loading took."""
    line = (
        f"kestrel-grpc ready: {served}, listening on {', '.join(addresses)}, "
        f"loaded in {load_s:.1f} s\n"
    )
    # A daemon thread, because a full pipe without a reader blocks the write.
    threading.Thread(target=_write, args=(line,), name="kestrel-ready", daemon=True).start()


def _write(text: str) -> None:
    """Writes to standard output without its buffer. Text left in the buffer would fail again when the process ends, and
    change the exit status."""
    try:
        os.write(sys.stdout.fileno(), text.encode())
    except OSError as error:
        # The disk is full, or the pipe has no reader. The server can serve nevertheless.
        logger.warning("cannot write the ready line: %s", error.strerror)
