"""AcceptedSockets: the TCP connections that gRPC accepted in this process. Owns how Linux shows and ends them.

gRPC's core keeps its sockets to itself. But they are descriptors of this process: /proc/self/fd lists them, TCP_INFO
tells how many bytes each received, and ``shutdown`` on a duplicate makes the core see the end of the connection, so
that it closes and frees it.
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
"""Of the kernel's struct tcp_info: as much as is read, and tcpi_bytes_received in it (Linux 4.1 and later)."""
_ENDED = (errno.EBADF, errno.ENOTCONN, errno.ENOTSOCK, errno.EINVAL)
"""What the system says of a descriptor that gRPC closed meanwhile, or whose connection has ended."""

_SCRAP = bytearray(1024 * 1024)
"""MSG_TRUNC drops what arrived and writes nothing here."""


@dataclass(slots=True, eq=False)
class Accepted:
    """One connection."""

    descriptor: int
    inode: int
    """Names the socket as long as it is open, as its descriptor alone does not."""
    peer: str
    """As gRPC names it: "ipv4:127.0.0.1:50000"."""
    received_bytes: int = 0
    """Of TCP, with TLS and all frames."""


class AcceptedSockets:
    """``ports``: those that the server listens on."""

    def __init__(self, ports: Callable[[], Collection[int]]) -> None:
        self._ports = ports
        self._known: dict[int, Accepted | None] = {}
        """By inode; None for a socket that is no connection to one of the ports."""

    @staticmethod
    def can_look() -> bool:
        """Whether this system shows what is needed."""
        return sys.platform == "linux" and os.path.isdir(_FOLDER)

    def look(self) -> list[Accepted]:
        """The open connections, with the bytes that each has received by now, in the order in which they were first
        seen. Raises OSError if the process has no descriptor left to look with."""
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

    def end(self, connection: Accepted) -> None:
        """Ends the connection, if it is still open. Raises OSError if the process has no descriptor left for it."""
        try:
            descriptor = os.dup(connection.descriptor)
        except OSError as error:
            if error.errno in _ENDED:
                return
            raise
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor) as duplicate:
            # gRPC may have closed it since, and the system given the number to another file.
            if os.fstat(descriptor).st_ino != connection.inode:
                return
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
                # Else the core would first take what has arrived, megabytes of headers in the case of an attack.
                while duplicate.recv_into(_SCRAP, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    pass
            except OSError as error:
                if error.errno not in (*_ENDED, errno.EAGAIN, errno.ECONNRESET):
                    raise

    def _identify(self, descriptor: int, inode: int) -> Accepted | None:
        borrowed = socket.socket(fileno=descriptor)
        try:
            if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if borrowed.getsockname()[1] not in self._ports():
                return None
            try:
                host, port, *_ = borrowed.getpeername()
            except OSError:  # It listens, or its peer has gone.
                return None
        finally:
            borrowed.detach()
        return Accepted(descriptor, inode, _peer(host, port))


def _received_bytes(descriptor: int) -> int:
    # The descriptor is gRPC's: a socket object that kept it would close it.
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
