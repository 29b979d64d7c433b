"""HeldPorts: the TCP addresses that workers share. Bound but not listened on: the kernel gives us no connections.

Holding them settles port 0 once for all workers, tells a second server that they are taken, also while no worker
listens, and keeps them between the death of one worker and the start of the next.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from ..settings.addresses import AddressError, check_free, with_port


class HeldPorts:
    """A context. ``addresses``: as workers are to listen on them, with the ports that were given for port 0."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        """Raises AddressError."""
        self._held = contextlib.ExitStack()
        try:
            self.addresses = tuple(self._hold(address) for address in addresses)
        except BaseException:
            self._held.close()
            raise

    def _hold(self, address: str) -> str:
        check_free(address)
        host, _, port_text = address.rpartition(":")
        port = int(port_text)
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, sockaddr in found:
                # A name may stand for several addresses (localhost); gRPC listens on all of them with one port.
                bound = self._bind(family, kind, protocol, (sockaddr[0], port, *sockaddr[2:]))
                port = port or bound
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise AddressError(f"cannot listen on {address}: {why}") from None
        return with_port(address, port)

    def _bind(self, family: int, kind: int, protocol: int, sockaddr: tuple[object, ...]) -> int:
        """The port; 0 for an address that this machine doesn't have."""
        held = self._held.enter_context(socket.socket(family, kind, protocol))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            try:
                held.bind(sockaddr)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Connections of a server that has just ended linger. This lets us bind beside them, and others beside
                # us as long as no worker listens.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(sockaddr)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return 0
        return int(held.getsockname()[1])

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
