"""HeldPorts: the TCP addresses that workers share. The supervisor binds them but does not listen on them.

Since the supervisor does not listen, the kernel passes it no connections. Its binding assigns one port to all workers
if the port is 0. It also keeps the address between the end of one worker and the start of the next, and makes a second
server fail to start even while no worker listens.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from ..settings.addresses import check_free, opening, with_port


class HeldPorts:
    """A context manager that holds addresses. ``addresses``: with the assigned ports in place of port 0."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        """Raises AddressError."""
        self._held = contextlib.ExitStack()
        self.sockets: list[tuple[str, int]] = []
        """Host and port of each bound socket. A name such as localhost may have several."""
        try:
            self.addresses = tuple(self._hold(address) for address in addresses)
        except BaseException:
            self._held.close()
            raise

    def _hold(self, address: str) -> str:
        check_free(address)
        host, _, port_text = address.rpartition(":")
        port = int(port_text)
        with opening(address):
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, sockaddr in found:
                # A name such as localhost may have several addresses. gRPC listens on all of them with one port.
                bound = self._bind(family, kind, protocol, (sockaddr[0], port, *sockaddr[2:]))
                port = port or bound
        return with_port(address, port)

    def _bind(self, family: int, kind: int, protocol: int, sockaddr: tuple[object, ...]) -> int:
        """Binds an address. Returns its port, or 0 if this machine does not have the address."""
        held = self._held.enter_context(socket.socket(family, kind, protocol))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            try:
                held.bind(sockaddr)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Connections of a server that has just ended may linger. SO_REUSEADDR allows binding beside them. It
                # also allows others to bind beside this process, as long as no worker listens.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(sockaddr)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return 0
        host, port, *_ = held.getsockname()
        self.sockets.append((host, port))
        return int(port)

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
