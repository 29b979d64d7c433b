"""HttpConnections: the open connections of the HTTP port, counted from the moment the server accepts them.

ConnectionGuard observes and ends them, as it does for gRPC. A connection counts before its TLS handshake too. uvicorn
bounds what it reads ahead, so received bytes need no account here.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

from ...security.connections.accepted_connection import AcceptedConnection
from ..context import peer_of


class HttpConnections:
    """At most ``most`` connections; None: no limit. For one event loop."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._numbers = itertools.count(1)
        self._seen: dict[int, AcceptedConnection] = {}
        """By number, the oldest first. The guard does not see connections of unix sockets."""
        self._ends: dict[int, Callable[[], object]] = {}
        """What ends each open connection, by its number."""

    def add(self, accepted: socket.socket, address: Any) -> int | None:
        """Returns the number of a new connection; None if there are too many. ``address``: the peer's."""
        if self._most is not None and len(self._ends) >= self._most:
            return None
        number = next(self._numbers)
        if accepted.family != socket.AF_UNIX:
            peer = peer_of(address[:2])
            self._seen[number] = AcceptedConnection(accepted.fileno(), number, peer)
        self._ends[number] = accepted.close
        return number

    def set_end(self, number: int, end: Callable[[], object]) -> None:
        """From now on, ``end`` ends a connection."""
        self._ends[number] = end

    def remove(self, number: int) -> None:
        """The connection has ended. Idempotent."""
        self._seen.pop(number, None)
        self._ends.pop(number, None)

    def look(self) -> list[AcceptedConnection]:
        """The open connections of TCP, the oldest first."""
        return [*self._seen.values()]

    def end(self, connection: AcceptedConnection) -> None:
        """Ends a connection if it is still open."""
        if connection.inode in self._ends:
            self._ends[connection.inode]()

    def end_all(self) -> None:
        for end in [*self._ends.values()]:
            end()
