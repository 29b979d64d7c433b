"""KestrelServer: one model behind gRPC. Owns the grpc server, its addresses and the order of starting and stopping.

Start: listen first, so that health can be asked, with NOT_SERVING; then load; then serve. Stop: health turns
NOT_SERVING; after a delay, if one is wanted, new requests are refused with UNAVAILABLE while the running ones end; what
is left at the end of the grace period fails with UNAVAILABLE; then the listeners close. At an address that other
processes share it listens only while requests are answered: to one who wouldn't, the kernel would give its share of
connections all the same. Knows no signals and no command line: see cli/serve.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import (
    add_AdminServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import (
    add_ImageServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import (
    add_ModelServiceServicer_to_server,
)
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import (
    add_VisionServiceServicer_to_server,
)
from kestrel_engine import InferenceEngine, RuntimeConfig

from ..edge.call import Call
from ..edge.generic_methods import GenericMethods
from ..edge.interceptors import CallInterceptor, InFlight
from ..http.opening import open_http
from ..images.pictures import Pictures
from ..images.store import ImageStore
from ..images.upload import UploadRoom
from ..logs.records import tell_lifecycle
from ..monitoring.access_log import AccessLog
from ..monitoring.call_statistics import CallStatistics
from ..monitoring.capture import Capture
from ..monitoring.load import LoadMeter
from ..monitoring.orca import LoadTrailer
from ..monitoring.profiles import Profiles
from ..security.admission.guard import Guard
from ..security.files.file_modes import exposures
from ..security.identity.tls import server_credentials
from ..security.listening import add_port, check_exposure
from ..served_model import ServedModel, State
from ..services import health
from ..services.admin import AdminService
from ..services.image import ImageService
from ..services.model import ModelService
from ..services.reflection import add_reflection
from ..services.vision import VisionService
from ..settings.addresses import check_free, close_address, unix_path, with_port
from ..settings.security import SecurityConfig
from ..settings.server import COMPRESSIONS, ServerConfig
from ..telemetry.edge_counts import EdgeCounts
from ..telemetry.open_files import open_connections
from ..telemetry.opening import Telemetry, open_telemetry
from .file_watch import INTERVAL_S, FileWatch
from .heap import follow_heap

if TYPE_CHECKING:
    from ..http.listener import HttpListener

logger = logging.getLogger(__name__)

VISION_SERVICE: str = vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"].full_name
IMAGE_SERVICE: str = image_service_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name
ADMIN_SERVICE: str = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
MODEL_SERVICE: str = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
SERVICES = (VISION_SERVICE, IMAGE_SERVICE, MODEL_SERVICE, ADMIN_SERVICE)

LAST_WORDS_S = 2.0
"""How long calls whose request has ended may take to tell their caller, once the server drains."""

_HANDSHAKE_S = 10.0
"""How long a connection may say nothing at first: silent ones keep others out (--max-connections)."""

_FOREVER_MS = 2**31 - 1
"""The largest number that a channel argument takes."""

LoadEngine = Callable[[], Awaitable[InferenceEngine]]


class KestrelServer:
    """``start``, ``load``, ``stop``, in this order, on one event loop."""

    def __init__(
        self, config: ServerConfig, runtime: RuntimeConfig, load_engine: LoadEngine
    ) -> None:
        """Raises TokenFileError."""
        self._config = config
        self._load_engine = load_engine
        self.served = ServedModel(runtime)
        self.addresses: tuple[str, ...] = ()
        """What the server listens on, with the ports that it was given for port 0."""
        self.own_addresses: tuple[str, ...] = ()
        """Of them, those that no other process shares."""
        self.load_seconds = 0.0
        self._started_at: float | None = None
        self.images = ImageStore(config.image_store_bytes)
        self.uploads = UploadRoom(max(config.image_store_bytes, runtime.image_limits.max_bytes))
        """The pictures kept for later requests."""
        self.guard = Guard(config.security, config.max_message_bytes, self.served.check_room)
        """Who calls, and what of their calls is in progress."""
        self.load_meter = LoadMeter(self.served)
        """How busy it is."""
        self.call_statistics = CallStatistics()
        """What became of its calls."""
        self.telemetry: Telemetry | None = None
        """Once started: watches calls, and wants to be the engine's observer. None: nothing is measured."""
        self.capture = Capture(config.debug, self.served)
        """Requests that fail, where that is wanted."""
        self.profiles = Profiles(config.debug)
        """What step thread and device do, where that is wanted."""
        self._in_flight = InFlight()
        self._files = FileWatch()
        self._watching: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._health = health.Health(
            self.served,
            lambda: self._files.is_crowded,
            following=(VISION_SERVICE, IMAGE_SERVICE),
            others=(MODEL_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME),
        )
        self._servers: list[grpc.aio.Server] = []
        self._shared: grpc.aio.Server | None = None
        """Of them, the one whose addresses are shared."""
        self._leaving: asyncio.Task[None] | None = None
        self._interceptor: CallInterceptor | None = None
        self._credentials: grpc.ServerCredentials | None = None
        self._http: HttpListener | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """What the server listens on for HTTP, with the ports that it was given for port 0."""
        return () if self._http is None else self._http.addresses

    async def start(self) -> None:
        """Listens; requests get UNAVAILABLE until ``load`` is done. Raises AddressError, TlsError."""
        security = self._config.security
        for exposure in exposures(security):
            logger.warning("%s", exposure)
        check_exposure((*self._config.listen, *self._config.shared_listen), security)
        if security.tls is not None:
            self._credentials = server_credentials(security.tls)
        self.telemetry = open_telemetry(
            self._config.telemetry,
            security,
            num_calls=lambda: self._in_flight.count,
            is_ready=lambda: self.served.state is State.READY,
            edge=EdgeCounts(
                connections=self._num_connections,
                visits=lambda: self.guard.visits.num_calls,
                max_connections=security.connections.connections,
                max_streams=security.connections.streams,
            ),
        )
        log = AccessLog(self._config.access_log)

        def end_call(call: Call) -> None:
            log(call)
            self.load_meter.on_call(call)
            self.call_statistics.on_call(call)
            self.capture.on_call(call)

        self._interceptor = CallInterceptor(
            self._in_flight,
            self.guard,
            end_call,
            self.telemetry,
            LoadTrailer(self.load_meter.read, VISION_SERVICE) if self._config.orca else None,
        )
        self._health.start()
        if self._config.http.http_listen:
            self._http = open_http(
                self._config.http,
                security,
                VisionService(self.served, Pictures(self.images)),
                self._model_service(),
                self.served,
                self._in_flight,
                self.guard,
                end_call,
                self.telemetry,
            )
            await self._http.start()
            tell_lifecycle("listening", addresses=self._http.addresses, protocol="http")
        if self._config.listen:
            await self._open(self._config.listen)
        self._watching = asyncio.create_task(self._watch_files())
        self._trimming = asyncio.create_task(follow_heap(self.guard.take_freed_bytes))
        self._started_at = time.monotonic()

    async def _open(self, addresses: tuple[str, ...], *, shared: bool = False) -> None:
        """Listens on ``addresses``, all services behind each. Raises AddressError."""
        assert self._interceptor is not None, "started"
        security = self._config.security
        received = self.guard.messages.received
        options = _channel_options(received, self._config.max_message_bytes, security, shared)
        options.append(
            ("grpc.default_compression_level", COMPRESSIONS.index(self._config.compression))
        )
        server = grpc.aio.server(interceptors=(self._interceptor,), options=options)
        methods = GenericMethods(server).as_server
        pictures = Pictures(self.images)
        add_VisionServiceServicer_to_server(VisionService(self.served, pictures), methods)
        add_ImageServiceServicer_to_server(
            ImageService(self.served, pictures, self.uploads, self._config.upload_idle_s), methods
        )
        add_ModelServiceServicer_to_server(self._model_service(), methods)
        admin = AdminService(
            self.served,
            self.images,
            self.guard,
            self.drain,
            self.profiles,
            self.capture,
            self.call_statistics,
        )
        add_AdminServiceServicer_to_server(admin, methods)
        self._health.add_to(methods)
        add_reflection(methods, (*SERVICES, health.SERVICE_NAME))
        bound: list[str] = []
        for address in addresses:
            if not shared:
                check_free(address)
            bound.append(with_port(address, add_port(server, address, self._credentials)))
        await server.start()
        self._servers.append(server)
        if shared:
            self._shared = server
        else:
            self.own_addresses = tuple(bound)
        self.addresses += tuple(bound)
        tell_lifecycle("listening", addresses=bound)

    def _model_service(self) -> ModelService:
        return ModelService(
            self.served,
            self.load_meter,
            max_message_bytes=self._config.max_message_bytes,
            image_store_bytes=self._config.image_store_bytes,
        )

    async def _watch_files(self) -> None:
        while True:
            if self._files.look():
                self._health.update()
            await asyncio.sleep(INTERVAL_S)

    def _num_connections(self) -> int | None:
        """Any thread."""
        tcp = (address for address in self.addresses if unix_path(address) is None)
        return open_connections([int(address.rpartition(":")[2]) for address in tcp])

    async def load(self) -> InferenceEngine:
        """Loads the model and takes requests. Raises ConfigError, ModelLoadError, AddressError."""
        started = time.monotonic()
        try:
            engine = await self._load_engine()
        except Exception as error:
            # In text the command's last line gives the error; a log in JSON needs it in this record.
            as_json = self._config.log_format == "json"
            tell_lifecycle("failed", **({"error": str(error)} if as_json else {}))
            raise
        self.load_seconds = time.monotonic() - started
        if self.telemetry is not None:
            self.telemetry.ready(engine, self.load_seconds)
        self.served.ready(engine)
        self._health.update()
        if self._config.shared_listen and self.served.state is State.READY:
            await self._open(self._config.shared_listen, shared=True)
        self._following = asyncio.create_task(self._health.follow())
        if self.served.state is State.READY:
            info, seconds = engine.info, round(self.load_seconds, 3)
            tell_lifecycle(
                "ready", model=info.model, device=info.device, dtype=info.dtype, load_s=seconds
            )
        return engine

    async def drain(self) -> None:
        """Takes no more requests, and at shared addresses no more connections; requests that run go on. Idempotent."""
        if self.served.state is not State.DRAINING:
            engine = self.served.loaded
            tell_lifecycle("draining", requests=0 if engine is None else engine.num_requests)
        self.served.drain()
        self._health.update()
        if self._shared is not None and self._leaving is None:
            # Callers are told to connect anew, which leads them to another process.
            longest_s = self._config.security.age_grace_s or _FOREVER_MS / 1000
            self._leaving = asyncio.create_task(self._shared.stop(longest_s))

    async def stop(self, grace_s: float, delay_s: float = 0.0) -> None:
        """Takes requests for ``delay_s`` seconds more, with health NOT_SERVING; lets running ones end for up to
        ``grace_s`` seconds, fails the rest, closes everything. Idempotent."""
        if delay_s and self.served.state is State.READY and self._following is not None:
            tell_lifecycle("leaving", delay_s=delay_s)
            self._health.leave()
            await asyncio.wait({self._following}, timeout=delay_s)  # It ends if the engine fails.
        await self.drain()
        for task in (self._following, self._watching, self._trimming):
            if task is not None:
                task.cancel()
        engine = self.served.loaded
        if engine is not None:
            await self.profiles.close()
            if engine.num_requests:
                logger.info("%d requests may end within %g s", engine.num_requests, grace_s)
            await engine.shutdown(grace_s=grace_s)
        if not await self._in_flight.wait_idle(LAST_WORDS_S):
            logger.warning("%d calls were cut off", self._in_flight.count)
        if self._http is not None:
            await self._http.stop()
        for server in self._servers:
            # Whoever still watches health is cut off here: such a stream never ends by itself.
            await server.stop(None)
        if self._leaving is not None:
            await self._leaving
        await self.capture.stop()
        for address in self.addresses:
            close_address(address)
        if self.telemetry is not None:
            await self.telemetry.close()
        if self._started_at is not None:
            tell_lifecycle("stopped", served_s=round(time.monotonic() - self._started_at, 3))
            self._started_at = None


def _channel_options(
    received_bytes: int, sent_bytes: int, security: SecurityConfig, shared: bool
) -> list[tuple[str, int]]:
    limits = security.connections
    return [
        ("grpc.max_receive_message_length", min(received_bytes, _FOREVER_MS)),
        ("grpc.max_send_message_length", sent_bytes),
        # gRPC's core would unpack a message before anyone can say that there is no room for it (edge/inflating.py).
        ("grpc.per_message_decompression", 0),
        # A stream that waits to be read holds a window's worth, 64 KiB. The probe would let windows grow to megabytes.
        ("grpc.http2.bdp_probe", 0),
        # TLS and the first frame of HTTP/2 must have come by then; gRPC's own is two minutes.
        ("grpc.server_handshake_timeout_ms", _milliseconds(_HANDSHAKE_S)),
        ("grpc.max_allowed_incoming_connections", limits.connections or _FOREVER_MS),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        # Between the two limits gRPC refuses at random.
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_connection_age_ms", _milliseconds(limits.age_s)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(security.age_grace_s)),
        # Two servers on one port would share its connections silently; so the second fails to start, if none is meant.
        ("grpc.so_reuseport", int(shared)),
        # Clients may ping every second, during long calls and between calls, without being thrown out.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that vanished without closing its connection is noticed after both.
        ("grpc.keepalive_time_ms", _milliseconds(limits.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.keepalive_timeout_s)),
        # That one waits for TCP; for the answer of a client that hangs gRPC waits so long, by default a minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(limits.keepalive_timeout_s)),
    ]


def _milliseconds(seconds: float | None) -> int:
    return _FOREVER_MS if seconds is None else round(1000 * seconds)
