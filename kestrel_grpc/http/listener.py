"""HttpListener: uvicorn on the server's own event loop. Owns its sockets and the limits of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..security.connections.connection_guard import ConnectionGuard
from ..security.identity.certificates import shown_by
from ..security.identity.tls import RenewedContext
from ..settings.addresses import AddressError, check_free, close_address, unix_path, with_port
from ..settings.http import HttpConfig
from .connections import HttpConnections
from .context import CERTIFICATE

_HEAD_S = 10.0
"""Seconds in which the head of a request must arrive, and before it the TLS handshake must end, because silent
connections count against the limit."""
_SHUTDOWN_S = 2.0
"""Seconds that a closing connection waits for the client's end of TLS."""
_UNREAD_S = 60.0
"""Seconds after which a connection is closed if its peer acknowledges no data."""
_HEAD_BYTES = 64 * 1024
_FREE_LINES = 2000
_BYTES_A_LINE = 256
"""A request may have _FREE_LINES lines, and one more for each _BYTES_A_LINE. Headers and sizes of chunks are lines, and
parsing one takes up to 30 microseconds of the event loop."""
_BACKLOG = 512

logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # It warns of each malformed request.


class _Connection(H11Protocol):
    """A connection with the limits that uvicorn lacks: on the number of connections, and on the time of a request's
    head."""

    connections_of_port: HttpConnections
    number: int | None = None
    """The number among ``connections_of_port``; None before it counts."""
    _early = b""
    """What has arrived before ``connection_made``: asyncio may deliver data while it ends a TLS handshake."""
    _has_ended = False
    _lines = _bytes = 0
    """What has arrived since the last request began."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.number is None:
            self.number = self.connections_of_port.add(transport)
        if self.number is None or self._has_ended:
            transport.abort()
            return
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        is_tcp = found is not None and found.family != socket.AF_UNIX
        if is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = int(1000 * _UNREAD_S)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        certificate = shown_by(transport.get_extra_info("ssl_object"))
        self.app_state = {**self.app_state, CERTIFICATE: certificate}
        self._await_head()
        if self._early:
            self.data_received(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            self._early += data
            return
        self._bytes += len(data)
        self._lines += data.count(b"\r\n")
        if self._lines > _FREE_LINES + self._bytes // _BYTES_A_LINE:
            self.transport.abort()
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._lines = self._bytes = 0
            self._stop_timer()
        elif self._head_timer is None and self.conn.their_state is h11.IDLE:
            # The head of a next request has begun, so uvicorn's limit for idle connections no longer applies.
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()  # The handler does not read the request's body.

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        self._stop_timer()
        if self.number is not None:
            self.connections_of_port.remove(self.number)
        if self.transport is not None:
            super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Handshake(asyncio.Protocol):
    """A connection until its TLS handshake has ended. It counts from its beginning, and has limited time."""

    def __init__(self, connection: _Connection, tls: RenewedContext) -> None:
        self._connection, self._tls = connection, tls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        number = self._connection.connections_of_port.add(transport)
        if number is None:
            transport.abort()
            return
        self._connection.number = number
        transport.pause_reading()
        tasks = self._connection.tasks
        task = asyncio.create_task(self._secure(transport, number))
        task.add_done_callback(tasks.discard)
        tasks.add(task)

    async def _secure(self, transport: asyncio.Transport, number: int) -> None:
        secured = None
        # The client may not use TLS, may be too slow, or may have ended.
        with contextlib.suppress(OSError):
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self._connection,
                self._tls.context(),
                server_side=True,
                ssl_handshake_timeout=_HEAD_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        if secured is None:
            transport.abort()
            self._connection.connections_of_port.remove(number)
        else:
            self._connection.connection_made(secured)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Call ``start`` and then ``stop``, on one event loop."""

    def __init__(
        self,
        app: Any,
        config: HttpConfig,
        tls: RenewedContext | None,
        connections: HttpConnections,
        guard: ConnectionGuard,
    ) -> None:
        self._app, self._config, self._tls = app, config, tls
        self._connections, self._guard = connections, guard
        self._connection = type("Connection", (_Connection,), {"connections_of_port": connections})
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self._guarding: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()

    @property
    def ended(self) -> Mapping[str, int]:
        """Number of connections that the guard has ended, by reason."""
        return self._guard.ended

    async def start(self) -> None:
        """Listens on all addresses. Raises AddressError."""
        bound = []
        for address in self._config.http_listen:
            is_tcp = unix_path(address) is None
            is_shared = is_tcp and self._config.is_shared
            if not is_shared:
                check_free(address)
            listening = _socket(address, is_shared)
            server = _Server(self._settings(self._tls if is_tcp else None))
            task = asyncio.create_task(server.serve([listening]))
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            if task.done():
                task.result()
            self._servers.append((server, task))
            bound.append(with_port(address, listening.getsockname()[1]) if is_tcp else address)
        self.addresses = tuple(bound)
        self._guarding = asyncio.create_task(self._guard.run())

    async def stop(self) -> None:
        """Closes all connections. Idempotent."""
        if self._guarding is not None:
            self._guarding.cancel()
        for server, _ in self._servers:
            server.should_exit = True
        for _, task in self._servers:
            await task
        self._servers.clear()
        self._connections.end_all()
        for address in self.addresses:
            close_address(address)

    def _settings(self, tls: RenewedContext | None) -> uvicorn.Config:
        def accept(**options: Any) -> asyncio.Protocol:
            connection = self._connection(**options)
            return connection if tls is None else _Handshake(connection, tls)

        settings = uvicorn.Config(
            self._app,
            http=accept,  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(self._config.http_idle_s),
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        settings.load()
        return settings


def _socket(address: str, is_shared: bool) -> socket.socket:
    """Returns a listening socket. ``is_shared``: other processes may listen on the address too. Raises AddressError."""
    path = unix_path(address)
    try:
        if path is not None:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(os.fspath(path))
        else:
            host, _, port = address.rpartition(":")
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, sockaddr = found[0]
            listening = socket.socket(family, kind, protocol)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(sockaddr)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AddressError(f"cannot listen on {address}: {reason}") from None
    return listening
