"""HttpListener: uvicorn on the server's own event loop. Owns its sockets and the limits of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...security.connections.connection_guard import ConnectionGuard
from ...security.hosts import Hosts
from ...security.identity.certificates import shown_by
from ...security.identity.tls import RenewedContext
from ...settings.addresses import check_free, close_address, opening, unix_path, with_port
from ...settings.http import HttpConfig
from ...settings.security import SecurityConfig
from ..context import CERTIFICATE
from .acceptor import Acceptor, Tls
from .connections import HttpConnections
from .framing import HEAD_BYTES, RefusedRequest, RequestFraming

_HEAD_S = 10.0
"""Seconds in which the head of a request must arrive, and before it the TLS handshake must end, because silent
connections count against the limit."""
_SHUTDOWN_S = 2.0
"""Seconds that a closing connection waits for the client's end of TLS."""
_UNREAD_S = 60.0
"""Seconds after which a connection is closed if its peer acknowledges no data."""
_READ_BYTES = 64 * 1024
"""Bytes that a connection reads at once. Before a request is admitted, the server holds twice as many of it at most."""
_REQUEST_S, _HEADER_S, _BYTE_S = 0.6e-3, 15e-6, 0.2e-6
"""Seconds for each request, and for each header and byte of its head, in which the port takes no further head. The
cheapest requests need half of it, so that strangers who send them without end leave half of the loop to others."""
_BURST_S = 0.05
"""Seconds of turns that a port which had none lately gives at once: callers often come together."""
_LINGER_S, _LINGER_BYTES = 1.0, 1024 * 1024
"""How much of a request that was refused unread is received and dropped. A closed connection resets the client, and
many clients then report a broken pipe in place of the refusal, which they have not read yet."""
_BACKLOG = 512

logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # It warns of each malformed request.


class _Turns:
    """When the connections of a port may pass heads to h11: one after the other, in the order in which they arrived."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = clock()

    def next_at(self, head: bytes) -> float:
        """The time for this head."""
        now = self._clock()
        turn_at = max(self._free_at, now - _BURST_S)
        cost_s = _REQUEST_S + head.count(b"\n") * _HEADER_S + len(head) * _BYTE_S
        self._free_at = turn_at + cost_s
        return max(turn_at, now)


class _Lingering:
    """A connection's transport, which goes on receiving for a moment if it is closed before a request has arrived. If
    it is closed in the middle of a response, it goes on sending for a moment: the peer may read nothing.

    ``is_incomplete``: whether the request has not arrived. ``is_cut``: whether there is more of the response.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        is_incomplete: Callable[[], bool],
        is_cut: Callable[[], bool],
    ) -> None:
        self._transport, self._is_incomplete, self._is_cut = transport, is_incomplete, is_cut
        self._left: int | None = None
        """Bytes that may still be dropped; None until then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._left is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_incomplete() or not self._transport.can_write_eof():
            self._transport.close()
            if self._is_cut() and self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
            return
        self._left = _LINGER_BYTES
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def drop(self, num_bytes: int) -> None:
        """Bytes have arrived after ``close``."""
        if self._left is not None:
            self._left -= num_bytes
            if self._left < 0:
                self._transport.abort()


class _Connection(H11Protocol):
    """A connection with the limits that uvicorn lacks: on the number of connections, on the time of a request's head,
    and those of RequestFraming."""

    connections_of_port: HttpConnections
    accepts_host: Callable[[str], bool]
    """Whether the port answers to a value of the header Host."""
    turns: _Turns
    number: int
    """The number among ``connections_of_port``."""
    _head_timer: asyncio.TimerHandle | None = None
    _turn: asyncio.TimerHandle | None = None
    """Set while a head waits for its turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections_of_port.set_end(self.number, transport.abort)
        lingering: Any = _Lingering(transport, self._awaits_body, self._is_responding)
        super().connection_made(lingering)
        self._framing = RequestFraming(self.accepts_host)
        found = transport.get_extra_info("socket")
        is_tcp = found is not None and found.family != socket.AF_UNIX
        if is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = int(1000 * _UNREAD_S)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        certificate = shown_by(transport.get_extra_info("ssl_object"))
        self.app_state = {**self.app_state, CERTIFICATE: certificate}
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self._framing.feed(data)
            self._go_on()
        else:
            cast(Any, self.transport).drop(len(data))

    def _awaits_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._awaits_body():
            self.transport.close()  # The handler does not read the request's body.
        elif not self.transport.is_closing():
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._turn is not None:
            self._turn.cancel()
        self.connections_of_port.remove(self.number)
        super().connection_lost(exc)

    def _go_on(self) -> None:
        """Gives h11 what it may read: no bytes of a request before the response to the one before it has ended."""
        framing = self._framing
        try:
            while framing.has_more and self._turn is None and not self.transport.is_closing():
                is_head = framing.is_between
                if is_head and self.conn.their_state is not h11.IDLE:
                    self.flow.pause_reading()
                    break
                taken = framing.take()
                if is_head:
                    self._take_head(taken)
                elif taken:
                    super().data_received(taken)
                if not taken:
                    break
        except RefusedRequest as refused:
            self._refuse(refused)

    def _take_head(self, head: bytes) -> None:
        """``head``: b"" if it has not arrived as a whole."""
        self._unset_keepalive_if_required()  # uvicorn's limit for idle connections no longer applies.
        if not head:
            if self._head_timer is None:
                self._await_head()
            return
        self._stop_timer()
        turn_at = self.turns.next_at(head)
        if turn_at <= self.loop.time():
            super().data_received(head)
        else:
            self.flow.pause_reading()
            self._turn = self.loop.call_at(turn_at, self._take_turn, head)

    def _take_turn(self, head: bytes) -> None:
        self._turn = None
        if not self.transport.is_closing():
            super().data_received(head)
            self._go_on()

    def _refuse(self, refused: RefusedRequest) -> None:
        """Ends the connection, with a response if none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(refused.response())
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Receiving(asyncio.BufferedProtocol):
    """Passes to a connection at most _READ_BYTES at once. It is an object of its own because uvloop reads 250 KiB at
    once for every asyncio.Protocol, such as uvicorn's."""

    _buffer = memoryview(bytearray(_READ_BYTES))
    """What was read last, of any connection."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        for name in ("connection_made", "connection_lost", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(connection, name))

    @property
    def has_begun(self) -> bool:
        return self.connection.transport is not None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.connection.data_received(bytes(self._buffer[:nbytes]))


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the process has its own, and with Acceptor."""

    def __init__(
        self, config: uvicorn.Config, connections: HttpConnections, tls: RenewedContext | None
    ) -> None:
        super().__init__(config)
        self._connections, self._tls = connections, tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def new_protocol(number: int) -> _Receiving:
            connection = cast(type[_Connection], self.config.http_protocol_class)(
                config=self.config, server_state=self.server_state, app_state={}
            )
            connection.number = number
            return _Receiving(connection)

        tls = None if self._tls is None else Tls(self._tls.context, _HEAD_S, _SHUTDOWN_S)
        parts = new_protocol, self._connections, tls
        acceptors = [Acceptor(each, *parts) for each in sockets or ()]
        self.servers = cast(Any, acceptors)  # uvicorn closes them, and waits for their end.
        for acceptor in acceptors:
            acceptor.start()
        self.started = True


class HttpListener:
    """Call ``start`` and then ``stop``, on one event loop."""

    def __init__(
        self,
        app: Any,
        config: HttpConfig,
        security: SecurityConfig,
        tls: RenewedContext | None,
        connections: HttpConnections,
        guard: ConnectionGuard,
    ) -> None:
        self._app, self._config, self._security, self._tls = app, config, security, tls
        self._connections, self._guard = connections, guard
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
        turns = _Turns(asyncio.get_running_loop().time)
        for address in self._config.http_listen:
            is_tcp = unix_path(address) is None
            is_shared = is_tcp and self._config.is_shared
            if not is_shared:
                check_free(address)
            listening = _socket(address, is_shared)
            hosts = Hosts(address, self._config.http_hosts, self._security)
            settings, tls = self._settings(hosts, turns), self._tls if is_tcp else None
            server = _Server(settings, self._connections, tls)
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

    def _settings(self, hosts: Hosts, turns: _Turns) -> uvicorn.Config:
        class Connection(_Connection):
            connections_of_port = self._connections
            accepts_host = staticmethod(hosts.accepts)

        Connection.turns = turns
        settings = uvicorn.Config(
            self._app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(self._config.http_idle_s),
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        settings.load()
        return settings


def _socket(address: str, is_shared: bool) -> socket.socket:
    """Returns a listening socket. ``is_shared``: other processes may listen on the address too. Raises AddressError."""
    path = unix_path(address)
    with opening(address):
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
        return listening
