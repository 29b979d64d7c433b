"""Free ports for programs that need a number at their start. No other program takes such a port before its use."""

import itertools
import os
import socket

_NUMBERS = itertools.count()


def free_port() -> int:
    """Returns a port below 32768, where systems begin to choose. Processes with near numbers get other ports."""
    while True:
        port = 10_000 + (os.getpid() * 16 + next(_NUMBERS)) % 20_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def has_ipv6() -> bool:
    """Whether this machine's loopback has IPv6. Many containers have none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
