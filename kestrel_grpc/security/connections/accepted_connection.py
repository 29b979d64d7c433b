"""AcceptedSockets: finds, observes and ends the TCP connections that gRPC has accepted in this process. Linux only.

gRPC's core has no API for its sockets, but they are file descriptors of this process. /proc/self/fd lists them, and
TCP_INFO reports how many bytes each has received. ``shutdown`` on a duplicate ends a connection: the core detects the
end, closes the connection and frees it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

_FOLDER = "/proc/self/fd"
_INFO_BYTES, _RECEIVED = 136, slice(128, 136)
"""Bytes of the kernel's struct tcp_info to read, and the place of tcpi_bytes_received in it (Linux 4.1 and later)."""
_ENDED = (errno.EBADF, errno.ENOTCONN, errno.ENOTSOCK, errno.EINVAL)
"""Errors for a descriptor that gRPC has closed since, or whose connection has ended."""

_SCRAP = bytearray(1024 * 1024)
"""The buffer of reads that drop data. MSG_TRUNC writes nothing to it."""


@dataclass(slots=True, eq=False)
class AcceptedConnection:
    """One accepted connection."""

    descriptor: int
    inode: int
    """Identifies the socket while it is open. The descriptor alone does not, because it may be reused."""
    peer: str
    """The peer in gRPC's form: "ipv4:127.0.0.1:50000"."""
    received_bytes: int = 0
    """Received bytes of TCP, including TLS and all frames."""


class AcceptedSockets:
    """The connections of this process. ``ports``: returns the ports that the server listens on."""

    def __init__(self, ports: Callable[[], Collection[int]]) -> None:
        self._ports = ports
        self._known: dict[int, AcceptedConnection | None] = {}
        """The sockets by inode; None for a socket that is not a connection to one of the ports."""

    @staticmethod
    def can_look() -> bool:
        """Whether this system supports observing connections."""
        return sys.platform == "linux" and os.path.isdir(_FOLDER)

    def look(self) -> list[AcceptedConnection]:
        """The open connections with their current counts of received bytes, in the order in which they were first seen.
        Raises OSError if the process has no free descriptor."""
        seen: set[int] = set()
        for name in os.listdir(_FOLDER):
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                inode = status.st_ino
                if inode not in self._known:
                    self._known[inode] = self._identify(descriptor, inode)
                known = self._known[inode]
                if known is not None:
                    known.descriptor = descriptor
                    known.received_bytes = _received_bytes(descriptor)
                seen.add(inode)
            except OSError as error:
                if error.errno not in _ENDED:
                    raise
        for inode in self._known.keys() - seen:
            del self._known[inode]
        return [known for known in self._known.values() if known is not None]

    def end(self, connection: AcceptedConnection) -> None:
        """Ends the connection if it is still open. Raises OSError if the process has no free descriptor."""
        try:
            descriptor = os.dup(connection.descriptor)
        except OSError as error:
            if error.errno in _ENDED:
                return
            raise
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor) as duplicate:
            # gRPC may have closed the socket, and the system may have reused the descriptor for another file.
            if os.fstat(descriptor).st_ino != connection.inode:
                return
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
                # Drops the received data. Otherwise the core would process it first: megabytes of headers in an attack.
                while duplicate.recv_into(_SCRAP, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    pass
            except OSError as error:
                if error.errno not in (*_ENDED, errno.EAGAIN, errno.ECONNRESET):
                    raise

    def _identify(self, descriptor: int, inode: int) -> AcceptedConnection | None:
        borrowed = socket.socket(fileno=descriptor)
        try:
            if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if borrowed.getsockname()[1] not in self._ports():
                return None
            try:
                host, port, *_ = borrowed.getpeername()
            except OSError:  # The socket listens, or its connection has ended.
                return None
        finally:
            borrowed.detach()
        return AcceptedConnection(descriptor, inode, _peer(host, port))


def _received_bytes(descriptor: int) -> int:
    # detach() prevents the socket object from closing gRPC's descriptor.
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    finally:
        borrowed.detach()
    return int.from_bytes(info[_RECEIVED], sys.byteorder)


def _peer(host: str, port: int) -> str:
    mapped = host.removeprefix("::ffff:")
    if ":" not in mapped:
        return f"ipv4:{mapped}:{port}"
    return f"ipv6:%5B{host}%5D:{port}"
