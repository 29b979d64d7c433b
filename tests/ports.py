"""Ports for programs that must be told where to listen: nobody takes one between its choice and its use."""

from __future__ import annotations

import itertools
import os
import socket

_NUMBERS = itertools.count()


def free_port() -> int:
    """Is below the ports that systems choose (from 32768), and processes whose numbers are near have others."""
    while True:
        port = 10_000 + (os.getpid() * 16 + next(_NUMBERS)) % 20_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
