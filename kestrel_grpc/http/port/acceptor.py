"""Acceptor: accepts the connections of one listening socket. Pauses while the process has no free file descriptor.

asyncio's own server logs a traceback for each connection that it can't accept, and tries thousands of times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

from kestrel_engine import clock

from .connections import HttpConnections

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Connections that are accepted before other events of the loop have their turn."""
_PAUSE_S = 1.0
_LOG_EVERY_S = 60.0


class Tls(NamedTuple):
    """TLS of connections. ``context``: returns that of the next one. ``handshake_s``, ``shutdown_s``: limits on the
    seconds that its handshake takes, and its end."""

    context: Callable[[], ssl.SSLContext]
    handshake_s: float
    shutdown_s: float


class Acceptor:
    """``new_protocol`` makes the protocol of each connection by its number among ``connections``. Call ``start`` and
    then ``close`` on one event loop."""

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[int], Any],
        connections: HttpConnections,
        tls: Tls | None,
    ) -> None:
        self._listening, self._new_protocol = listening, new_protocol
        self._connections, self._tls = connections, tls
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._logged_at = -float("inf")

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accepts no further connections, and ends those that have not begun. Idempotent; the socket stays open."""
        self._loop.remove_reader(self._listening)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until every accepted connection has begun or ended."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # EMFILE, ENFILE, ENOBUFS, ENOMEM
                self._wait(error)
                return
            number = self._connections.add(accepted, address)
            if number is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            protocol = self._new_protocol(number)
            task = self._loop.create_task(self._begin(accepted, protocol))
            self._connections.set_end(number, task.cancel)
            self._beginning.add(task)
            task.add_done_callback(functools.partial(self._begun, accepted, protocol, number))

    async def _begin(self, accepted: socket.socket, protocol: Any) -> None:
        tls = self._tls
        # An error: the client has left, does not use TLS or is too slow, or no descriptor is free.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=tls and tls.context(),
                ssl_handshake_timeout=tls and tls.handshake_s,
                ssl_shutdown_timeout=tls and tls.shutdown_s,
            )

    def _begun(
        self, accepted: socket.socket, protocol: Any, number: int, task: asyncio.Task[None]
    ) -> None:
        self._beginning.discard(task)
        if not protocol.has_begun:
            self._connections.remove(number)
            accepted.close()

    def _wait(self, error: OSError) -> None:
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(_PAUSE_S, self.start)
        if clock.now() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = clock.now()
            reason = (error.strerror or str(error)).lower()
            logger.error(
                "cannot accept connections by HTTP: %s; tries again every second; raise the limit on open files "
                "(ulimit -Hn, systemd's LimitNOFILE=)",
                reason,
            )
