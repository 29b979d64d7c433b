"""GrpcPorts: the gRPC servers of this process, their services, addresses and options.

The server listens on an address that it shares with other processes only while it accepts requests. Otherwise the
kernel would pass it a share of the connections all the same.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from kestrel_client._pb.inference.grpc_service_pb2_grpc import (
    add_GRPCInferenceServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from kestrel_client._pb.kestrel.v1.batch_service_pb2_grpc import add_BatchServiceServicer_to_server
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import add_ImageServiceServicer_to_server
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import (
    add_VisionServiceServicer_to_server,
)

from ..edge.forwarded import FrontCalls
from ..edge.methods import Methods
from ..http.services import HttpServices
from ..logs.records import log_lifecycle
from ..monitoring.orca import LoadReports
from ..security.listening import add_port
from ..service_names import SERVICES
from ..services import health
from ..services.admin import AdminService
from ..services.load_reports import add_load_reports
from ..services.reflection import add_reflection
from ..settings.addresses import check_free, close_address, with_port
from ..settings.security import SecurityConfig
from ..settings.server import COMPRESSIONS, ServerConfig

_HANDSHAKE_S = 10.0
"""Seconds in which a new connection must finish its handshake. Silent connections count for --max-connections."""

_FOREVER_MS = 2**31 - 1
"""The largest value of a channel argument."""
_MANY = 1_000_000
"""No limit on a number. gRPC's core aborts the process at the largest value."""

_PENDING_CALLS = 8192
"""Calls that have arrived and wait for the event loop. gRPC cancels further ones. Each holds its metadata."""

_CHANNELZ = "grpc_channelz"
"""The package with the service of gRPC's own counts of connections and calls (extra channelz). It needs the scope
admin, because it names the addresses of all clients."""
_FRONT_HEADERS, _CERTIFICATES_BYTES = 4, 64 * 1024
"""The front passes metadata of this many times the limit, and adds a client's certificates."""


class GrpcPorts:
    """``received_bytes``: limit of gRPC on a message. ``is_serving``: answers the health checks of the front.
    ``credentials``: None without TLS."""

    def __init__(
        self,
        config: ServerConfig,
        received_bytes: int,
        methods: Methods,
        is_serving: Callable[[], bool],
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        self._config, self._received_bytes = config, received_bytes
        self._methods, self._is_serving = methods, is_serving
        self._credentials = credentials
        self._servers: list[grpc.aio.Server] = []
        self._shared: grpc.aio.Server | None = None
        """The one of ``_servers`` that listens on shared addresses."""
        self._leaving: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()
        """As KestrelServer has them, like the next."""
        self.own_addresses: tuple[str, ...] = ()

    async def open(
        self, addresses: tuple[str, ...], *, shared: bool = False, front: bool = False
    ) -> None:
        """Listens on ``addresses``. ``shared``: with other processes. ``front``: for the front. Raises AddressError."""
        config = self._config
        options = _channel_options(
            self._received_bytes, config.max_message_bytes, config.security, shared
        )
        interceptors: tuple[FrontCalls, ...] = ()
        if front:
            options = list((dict(options) | _front_options(config.security)).items())
            interceptors = (FrontCalls(self._is_serving),)
        options.append(("grpc.default_compression_level", COMPRESSIONS.index(config.compression)))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        self._methods.add_to(server)
        bound: list[str] = []
        for address in addresses:
            if not shared:
                check_free(address)
            bound.append(with_port(address, add_port(server, address, self._credentials)))
        await server.start()
        self._servers.append(server)
        self.addresses += tuple(bound)
        if front:
            return
        if shared:
            self._shared = server
        else:
            self.own_addresses = tuple(bound)
        log_lifecycle("listening", addresses=bound)

    def leave(self) -> None:
        """Asks the clients of shared addresses to connect again, to another process. Idempotent."""
        if self._shared is not None and self._leaving is None:
            longest_s = self._config.security.age_grace_s or _FOREVER_MS / 1000
            self._leaving = asyncio.create_task(self._shared.stop(longest_s))

    async def close(self) -> None:
        """Ends all calls and closes the addresses. Idempotent."""
        for server in self._servers:
            # This also ends health's Watch streams, which never end by themselves.
            await server.stop(None)
        if self._leaving is not None:
            await self._leaving
        for address in self.addresses:
            close_address(address)


def add_services(
    methods: Methods,
    both: HttpServices,
    admin: AdminService,
    own_health: health.Health,
    load_reports: LoadReports | None,
) -> None:
    """``both``: the services that the HTTP port has too. ``load_reports``: None if the server sends none."""
    server = methods.as_server
    add_VisionServiceServicer_to_server(both.vision, server)
    add_GRPCInferenceServiceServicer_to_server(both.inference, server)
    add_ImageServiceServicer_to_server(both.images, server)
    add_ModelServiceServicer_to_server(both.models, server)
    add_BatchServiceServicer_to_server(both.batches, server)
    add_AdminServiceServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(own_health, server)
    if load_reports is not None:
        add_load_reports(methods, load_reports.current)
    names = [*SERVICES, health.SERVICE_NAME]
    if importlib.util.find_spec(_CHANNELZ) is not None:
        stubs = importlib.import_module(f"{_CHANNELZ}.v1.channelz_pb2_grpc")
        servicer = importlib.import_module(f"{_CHANNELZ}.v1.channelz").aio.ChannelzServicer()
        stubs.add_ChannelzServicer_to_server(servicer, server)
        names.append("grpc.channelz.v1.Channelz")
    add_reflection(methods, tuple(names))


def _channel_options(
    received_bytes: int, sent_bytes: int, security: SecurityConfig, shared: bool
) -> list[tuple[str, int]]:
    limits = security.connections
    return [
        ("grpc.max_receive_message_length", min(received_bytes, _FOREVER_MS)),
        ("grpc.max_send_message_length", sent_bytes),
        # gRPC's core would decompress a message before memory for it is reserved (edge/messages/incoming.py).
        ("grpc.per_message_decompression", 0),
        # A stream that the client does not read holds a window of 64 KiB. The probe could grow it to megabytes.
        ("grpc.http2.bdp_probe", 0),
        # Limits the time of the TLS handshake and HTTP/2's first frame. gRPC's default is two minutes.
        ("grpc.server_handshake_timeout_ms", _milliseconds(_HANDSHAKE_S)),
        ("grpc.max_allowed_incoming_connections", limits.connections or _MANY),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        # gRPC refuses calls at random between the soft and the absolute limit, so both are equal.
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams),
        # gRPC would refuse a stream, so that its caller gets UNAVAILABLE, while ended calls of the connection are not
        # freed yet. A client that keeps to the announced number can't know of them.
        ("grpc.http.overload_protection", 0),
        # gRPC cancels calls at random between these limits, by default 1000 and 3000, the calls of all clients alike.
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.max_connection_age_ms", _milliseconds(limits.age_s)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(security.age_grace_s)),
        # Without this, a second server on the same port would start and take some of the connections.
        ("grpc.so_reuseport", int(shared)),
        # Clients may send a ping every second, during calls and between them, without losing their connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        # The server closes the connection of a client that vanished after the sum of both times.
        ("grpc.keepalive_time_ms", _milliseconds(limits.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.keepalive_timeout_s)),
        # keepalive_timeout covers TCP. This is the time to answer a ping, by default a minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(limits.keepalive_timeout_s)),
    ]


def _front_options(security: SecurityConfig) -> dict[str, int]:
    """What differs on the front's socket: few connections carry all calls; the front asks clients to reconnect."""
    most_metadata = _FRONT_HEADERS * security.connections.metadata_bytes + _CERTIFICATES_BYTES
    return {
        "grpc.max_concurrent_streams": _MANY,
        "grpc.max_allowed_incoming_connections": _MANY,
        "grpc.max_connection_age_ms": _FOREVER_MS,
        "grpc.max_metadata_size": most_metadata,
        "grpc.absolute_max_metadata_size": most_metadata,
    }


def _milliseconds(seconds: float | None) -> int:
    return _FOREVER_MS if seconds is None else round(1000 * seconds)
