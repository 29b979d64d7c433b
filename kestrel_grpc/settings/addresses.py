"""Addresses to listen on: ``host:port``, ``[ipv6]:port`` or ``unix:path``.

This module parses addresses, checks that they are free, and removes the files of unix sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterator

_TCP = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})")
_MAX_UNIX_PATH = 103
"""Longest path of a socket in bytes that every system accepts: macOS accepts 103, Linux 107."""


class AddressError(Exception):
    """The server cannot listen on an address. The message names the address and the cause in one line."""


def parse_address(text: str) -> str:
    """The address in the form that grpc expects. Raises ValueError."""
    if text.startswith("unix:"):
        path = unix_path(text)
        if not path or len(os.fsencode(path)) > _MAX_UNIX_PATH:
            raise ValueError(f"a socket's path must have 1 to {_MAX_UNIX_PATH} bytes")
        return f"unix:{path}"
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("must be HOST:PORT, [IPV6]:PORT or unix:PATH")
    return text


def unix_path(address: str) -> str | None:
    """The path of a unix socket, None for TCP."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


def with_port(address: str, port: int) -> str:
    """``address`` with its port replaced by ``port``, the one that the system assigned."""
    return address if unix_path(address) is not None else f"{address.rpartition(':')[0]}:{port}"


def check_free(address: str) -> None:
    """Raises AddressError if the server cannot listen on ``address``. Removes the socket file of a dead server.

    grpc's own error does not name the cause.
    """
    path = unix_path(address)
    with opening(address):
        if path is not None:
            _check_unix(path)
        else:
            _check_tcp(address)


@contextlib.contextmanager
def opening(address: str, what: str = "listen") -> Iterator[None]:
    """Raises an OSError of the block as AddressError. ``what``: the server does at the address."""
    try:
        yield
    except OSError as error:
        hint = "; is another server running?" if error.errno == errno.EADDRINUSE else ""
        why = (error.strerror or str(error)).lower()
        raise AddressError(f"cannot {what} on {address}: {why}{hint}") from None


def close_address(address: str) -> None:
    """Removes the file of a unix socket if the closed server did not."""
    path = unix_path(address)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _check_tcp(address: str) -> None:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, sockaddr = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(sockaddr)
        # Binding succeeds beside a listener that allows it; listening does not.
        probe.listen(1)


def _check_unix(path: str) -> None:
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise OSError(errno.ENOENT, "its directory does not exist")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "address already in use")
