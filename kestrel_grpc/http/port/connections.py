"""HttpConnections: the open connections of the HTTP port, counted from the moment the server accepts them.

ConnectionGuard observes and ends them, as it does for gRPC. A connection counts before its TLS handshake too. uvicorn
bounds what it reads ahead, so received bytes need no account here.
"""

from __future__ import annotations

import asyncio
import itertools
import socket

from ...security.connections.accepted_connection import AcceptedConnection
from ..context import peer_of


class HttpConnections:
    """At most ``most`` connections; None: no limit. For one event loop."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[AcceptedConnection | None, asyncio.Transport]] = {}
        """By number, the oldest first. The guard does not see connections of unix sockets."""

    def add(self, transport: asyncio.Transport) -> int | None:
        """Returns the number of a new connection; None if there are too many."""
        if self._most is not None and len(self._open) >= self._most:
            return None
        number = next(self._numbers)
        found = transport.get_extra_info("socket")
        accepted = None
        if found is not None and found.family != socket.AF_UNIX:
            address = transport.get_extra_info("peername")
            accepted = AcceptedConnection(found.fileno(), number, peer_of(address and address[:2]))
        self._open[number] = accepted, transport
        return number

    def remove(self, number: int) -> None:
        """The connection has ended. Idempotent."""
        self._open.pop(number, None)

    def look(self) -> list[AcceptedConnection]:
        """The open connections of TCP, the oldest first."""
        return [accepted for accepted, _ in self._open.values() if accepted is not None]

    def end(self, connection: AcceptedConnection) -> None:
        """Ends a connection if it is still open."""
        found = self._open.get(connection.inode)
        if found is not None:
            found[1].abort()

    def end_all(self) -> None:
        for _, transport in list(self._open.values()):
            transport.abort()
