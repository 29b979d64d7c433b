"""HttpListener: uvicorn on the server's own event loop. Owns its sockets and the limits of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..settings.addresses import AddressError, check_free, close_address, unix_path, with_port
from ..settings.http import HttpConfig

_HEAD_S = 10.0
"""Seconds in which the head of a request must arrive, because silent connections count against the limit."""
_UNREAD_S = 60.0
"""Seconds after which a connection is closed if its peer acknowledges no data."""
_HEAD_BYTES = 64 * 1024
_BACKLOG = 512

logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # It warns of each malformed request.


class _Connection(H11Protocol):
    """A connection with two limits that uvicorn lacks: the number of connections, and the time of a request's head."""

    max_connections = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        found = transport.get_extra_info("socket")
        is_tcp = found is not None and found.family != socket.AF_UNIX
        if is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = int(1000 * _UNREAD_S)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()
        elif self._head_timer is None and self.conn.their_state is h11.IDLE:
            # The head of a next request has begun, so uvicorn's limit for idle connections no longer applies.
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Call ``start`` and then ``stop``, on one event loop."""

    def __init__(self, app: Any, config: HttpConfig, tls: ssl.SSLContext | None) -> None:
        self._config, self._tls = config, tls
        connection = type(
            "Connection", (_Connection,), {"max_connections": config.http_max_connections}
        )
        self._settings = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(config.http_idle_s),
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self.addresses: tuple[str, ...] = ()

    async def start(self) -> None:
        """Listens on all addresses. Raises AddressError."""
        self._settings.load()
        bound = []
        for address in self._config.http_listen:
            is_tcp = unix_path(address) is None
            is_shared = is_tcp and self._config.is_shared
            if not is_shared:
                check_free(address)
            listening = _socket(address, is_shared)
            self._settings.ssl = self._tls if is_tcp else None
            server = _Server(self._settings)
            task = asyncio.create_task(server.serve([listening]))
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            if task.done():
                task.result()
            self._servers.append((server, task))
            bound.append(with_port(address, listening.getsockname()[1]) if is_tcp else address)
        self.addresses = tuple(bound)

    async def stop(self) -> None:
        """Closes all connections. Idempotent."""
        for server, _ in self._servers:
            server.should_exit = True
        for _, task in self._servers:
            await task
        self._servers.clear()
        for address in self.addresses:
            close_address(address)


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
