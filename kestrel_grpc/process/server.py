"""KestrelServer: serves models with gRPC. Owns the grpc server, its addresses, and the order of start and stop.

Start: the server listens first, so that health checks get NOT_SERVING. Then it loads the models, one after the other,
and then it accepts requests.

Stop: health changes to NOT_SERVING. After an optional delay, new requests are refused with UNAVAILABLE while running
requests continue. At the end of the grace period, the remaining requests fail with UNAVAILABLE. Then the listeners
close.

The server listens on an address that it shares with other processes only while it accepts requests. Otherwise the
kernel would pass it a share of the connections all the same.

This module handles neither signals nor the command line: see cli/serve.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from kestrel_client._pb.inference.grpc_service_pb2_grpc import (
    add_GRPCInferenceServiceServicer_to_server,
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
from kestrel_engine import InferenceEngine, RuntimeConfig, clock

from ..edge.call_life import CallLife
from ..edge.calls.call_watcher import CallWatchers
from ..edge.calls.in_flight import InFlight
from ..edge.forwarded import FrontCalls
from ..edge.generic_methods import GenericMethods
from ..edge.interceptors import CallInterceptor
from ..edge.request_streams import StreamKind
from ..http.opening import open_http
from ..http.services import HttpServices
from ..images.request_images import RequestImages
from ..images.shared.opening import open_shared_images
from ..images.shared.shared_images import SharedImageEvent, SharedImages
from ..images.store import ImageStore
from ..images.upload import UploadRoom
from ..kserve import service as kserve
from ..logs.records import log_lifecycle
from ..model_changes import LoadModel, ModelChanges
from ..monitoring.access_log import AccessLog
from ..monitoring.call_statistics import CallStatistics
from ..monitoring.capture import Capture
from ..monitoring.load import LoadMeter
from ..monitoring.orca import LoadReports
from ..monitoring.profiles import Profiles
from ..security.admission.guard import Guard
from ..security.files.file_modes import exposures
from ..security.identity.tls import server_credentials
from ..security.listening import add_port, check_exposure
from ..served_model import ServedModel, ServedModels, State
from ..service_names import (
    ADMIN_SERVICE,
    IMAGE_SERVICE,
    KSERVE_METHODS,
    KSERVE_SERVICE,
    MODEL_SERVICE,
    SERVICES,
    VISION_METHODS,
    VISION_SERVICE,
)
from ..services import health
from ..services.admin import AdminService
from ..services.answers.frames import FRAMES
from ..services.image import ImageService
from ..services.load_reports import add_load_reports
from ..services.model import ModelService
from ..services.reflection import add_reflection
from ..services.vision import VisionService
from ..settings.addresses import check_free, close_address, unix_path, with_port
from ..settings.security import SecurityConfig
from ..settings.server import COMPRESSIONS, ServerConfig
from ..settings.telemetry import with_http
from ..telemetry.edge_counts import EdgeCounts
from ..telemetry.opening import Telemetry, open_telemetry
from .file_watch import INTERVAL_S, FileWatch
from .heap import follow_heap

if TYPE_CHECKING:
    from ..http.listener import HttpListener

logger = logging.getLogger(__name__)


LAST_WORDS_S = 2.0
"""Seconds that a draining server waits for calls to send their status after their requests have ended."""

_HANDSHAKE_S = 10.0
"""Seconds in which a new connection must finish its handshake. Silent connections count for --max-connections."""

_FOREVER_MS = 2**31 - 1
"""The largest value of a channel argument."""
_MANY = 1_000_000
"""No limit on a number. gRPC's core aborts the process at the largest value."""

_PENDING_CALLS = 8192
"""Calls that have arrived and wait for the event loop. gRPC cancels further ones. Each holds its metadata."""

_FRONT_HEADERS, _CERTIFICATES_BYTES = 4, 64 * 1024
"""The front passes metadata of this many times the limit, and adds a client's certificates."""

LoadEngine = Callable[[], Awaitable[InferenceEngine]]


class KestrelServer:
    """A server. Call ``start``, ``load`` and ``stop``, in this order, on one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        runtime: RuntimeConfig,
        load_engine: LoadEngine,
        *,
        others: Sequence[RuntimeConfig] = (),
        load_model: LoadModel | None = None,
    ) -> None:
        """``runtime``, ``load_engine``: the default model. ``others``: the models besides it. ``load_model`` loads
        these, and models that come later. Raises TokenFileError."""
        self._config = config
        self._load_engine = load_engine
        self.served = ServedModels(ServedModel(runtime), *map(ServedModel, others))
        self.addresses: tuple[str, ...] = ()
        """The addresses that the server listens on, with the assigned ports in place of port 0."""
        self.own_addresses: tuple[str, ...] = ()
        """Those of ``addresses`` that no other process shares."""
        self.load_seconds = 0.0
        self._started_at: float | None = None
        self.images = ImageStore(config.image_store_bytes)
        """The images stored for later requests."""
        self._shared_images: SharedImages | None = None
        """Set by ``start``."""
        self.uploads = UploadRoom(max(config.image_store_bytes, runtime.image_limits.max_bytes))
        self.guard = Guard(
            config.security, config.max_message_bytes, self.served.check_room, self._ports
        )
        self.load_meter = LoadMeter(self.served)
        self._load_reports = LoadReports(self.load_meter.read)
        self.call_statistics = CallStatistics()
        self.telemetry: Telemetry | None = None
        """Set by ``start``: receives events of calls, and must be the engine's observer. None without telemetry."""
        self.capture = Capture(config.debug, self.served)
        self.profiles = Profiles(config.debug)
        self._in_flight = InFlight()
        self._files = FileWatch()
        self._watching: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._health = health.Health(
            self.served,
            lambda: self._files.is_crowded,
            following=(VISION_SERVICE, IMAGE_SERVICE, KSERVE_SERVICE),
            others=(MODEL_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME),
        )
        self.models = ModelChanges(
            self.served, load_model, self._health.update, config.model_folders
        )
        """Loads and unloads models while the server runs."""
        self._servers: list[grpc.aio.Server] = []
        self._shared: grpc.aio.Server | None = None
        """The one of ``_servers`` that listens on shared addresses."""
        self._leaving: asyncio.Task[None] | None = None
        self._interceptor: CallInterceptor | None = None
        self._credentials: grpc.ServerCredentials | None = None
        self._http: HttpListener | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """What the server listens on for HTTP, with the ports that it was given for port 0."""
        return () if self._http is None else self._http.addresses

    @property
    def shares_images(self) -> bool:
        """Whether the store of shared images is used: one is set, and it has not failed lately."""
        return self._shared_images is not None and self._shared_images.breaker.is_closed

    async def start(self) -> None:
        """Starts to listen. Requests get UNAVAILABLE until ``load`` has finished. Raises AddressError, TlsError."""
        security = self._config.security
        for exposure in exposures(security):
            logger.warning("%s", exposure)
        check_exposure((*self._config.listen, *self._config.shared_listen), security)
        if security.tls is not None:
            self._credentials = server_credentials(security.tls)
        http = self._config.http
        has_http_metrics = bool(http.http_listen) and http.http_metrics
        self.telemetry = open_telemetry(
            with_http(self._config.telemetry) if has_http_metrics else self._config.telemetry,
            security,
            num_calls=lambda: self._in_flight.count,
            is_ready=lambda: self.served.state is State.READY,
            edge=EdgeCounts(
                connections=lambda: self.guard.connections.num_connections,
                ended=self._ended_connections,
                visits=lambda: self.guard.visits.num_calls,
                max_connections=security.connections.connections,
                max_streams=security.connections.streams,
            ),
        )
        self.models.telemetry = self.telemetry
        self._shared_images = open_shared_images(self._config.shared_images, self._on_shared_image)
        if self._shared_images is not None:
            self._shared_images.start()
            if self.telemetry is not None:
                self.telemetry.show_shared_images(lambda: self.shares_images)
        log = AccessLog(self._config.access_log)

        watcher = CallWatchers(
            log,
            self.load_meter.on_call,
            self.call_statistics.on_call,
            self.capture.on_call,
            watcher=self.telemetry,
        )
        self._interceptor = CallInterceptor(
            CallLife(self.guard, self.guard.connections, self._in_flight, watcher),
            self._load_reports.trailer if self._config.orca else None,
            {
                f"{KSERVE_METHODS}ModelStreamInfer": StreamKind(kserve.refuse),
                f"{VISION_METHODS}StreamFrames": FRAMES,
            },
        )
        self._health.start()
        if http.http_listen:
            images = RequestImages(self.images, self._shared_images)
            vision = self._vision_service(images)
            self._http = open_http(
                http,
                security,
                HttpServices(
                    vision,
                    self._image_service(images),
                    self._model_service(),
                    kserve.InferenceService(self.served, vision, self.call_statistics),
                    self.served,
                ),
                self._in_flight,
                self.guard,
                watcher,
                self.telemetry,
            )
            await self._http.start()
            log_lifecycle("listening", addresses=self._http.addresses, protocol="http")
        if self._config.listen:
            await self._open(self._config.listen)
        if self._config.front_listen is not None:
            await self._open((self._config.front_listen,), front=True)
        self._watching = asyncio.create_task(self._watch_files())
        self._trimming = asyncio.create_task(follow_heap(self.guard.take_freed_bytes))
        self._guarding = asyncio.create_task(self.guard.connections.run())
        self._started_at = clock.now()

    async def _open(
        self, addresses: tuple[str, ...], *, shared: bool = False, front: bool = False
    ) -> None:
        """Listens on ``addresses`` with all services. ``front``: only the front connects. Raises AddressError."""
        assert self._interceptor is not None, "started"
        security = self._config.security
        received = self.guard.messages.received
        options = _channel_options(received, self._config.max_message_bytes, security, shared)
        interceptors: tuple[CallInterceptor | FrontCalls, ...] = (self._interceptor,)
        if front:
            options = list((dict(options) | _front_options(security)).items())
            interceptors = (FrontCalls(lambda: self._health.is_serving), *interceptors)
        options.append(
            ("grpc.default_compression_level", COMPRESSIONS.index(self._config.compression))
        )
        server = grpc.aio.server(interceptors=interceptors, options=options)
        methods = GenericMethods(server).as_server
        images = RequestImages(self.images, self._shared_images)
        vision = self._vision_service(images)
        add_VisionServiceServicer_to_server(vision, methods)
        add_GRPCInferenceServiceServicer_to_server(
            kserve.InferenceService(self.served, vision, self.call_statistics), methods
        )
        add_ImageServiceServicer_to_server(self._image_service(images), methods)
        add_ModelServiceServicer_to_server(self._model_service(), methods)
        admin = AdminService(
            self.served,
            self.images,
            self.guard,
            self.drain,
            self.profiles,
            self.capture,
            self.call_statistics,
            self.models,
            self._config.grace_s,
        )
        add_AdminServiceServicer_to_server(admin, methods)
        self._health.add_to(methods)
        if self._config.orca:
            add_load_reports(methods, self._load_reports.current)
        add_reflection(methods, (*SERVICES, health.SERVICE_NAME))
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

    def _on_shared_image(self, event: SharedImageEvent) -> None:
        if self.telemetry is not None:
            self.telemetry.on_shared_image(event)

    def _vision_service(self, images: RequestImages) -> VisionService:
        return VisionService(self.served, images, self._config.max_message_bytes)

    def _image_service(self, images: RequestImages) -> ImageService:
        return ImageService(self.served, images, self.uploads, self._config.upload_idle_s)

    def _model_service(self) -> ModelService:
        return ModelService(
            self.served,
            self.load_meter,
            max_message_bytes=self._config.max_message_bytes,
            image_store_bytes=self._config.image_store_bytes,
        )

    def _ended_connections(self) -> Counter[str]:
        """By reason, of both ports."""
        ended = Counter(self.guard.connections.ended)
        if self._http is not None:
            ended.update(self._http.ended)
        return ended

    async def _watch_files(self) -> None:
        while True:
            if self._files.check():
                self._health.update()
            await asyncio.sleep(INTERVAL_S)

    def _ports(self) -> frozenset[int]:
        tcp = (address for address in self.addresses if unix_path(address) is None)
        return frozenset(int(address.rpartition(":")[2]) for address in tcp)

    async def load(self) -> InferenceEngine:
        """Loads the models and accepts requests. Returns the default model's engine.

        Raises ConfigError, ModelLoadError, AddressError.
        """
        started = clock.now()
        try:
            engine = await self._load_engine()
            try:
                await self.models.load_configured()
            except BaseException:
                await engine.shutdown()
                raise
        except Exception as error:
            # With a log as text, the command prints the error as its last line. A log in JSON needs it in this record.
            as_json = self._config.log_format == "json"
            log_lifecycle("failed", **({"error": str(error)} if as_json else {}))
            raise
        self.load_seconds = clock.now() - started
        if self.telemetry is not None:
            self.telemetry.ready(engine, self.load_seconds)
        self.served.default.ready(engine)
        self._health.update()
        if self._config.shared_listen and self.served.state is State.READY:
            await self._open(self._config.shared_listen, shared=True)
        self._following = asyncio.create_task(self._health.follow())
        if self.served.state is State.READY:
            info, seconds = engine.info, round(self.load_seconds, 3)
            log_lifecycle(
                "ready", model=info.model, device=info.device, dtype=info.dtype, load_s=seconds
            )
        return engine

    async def drain(self) -> None:
        """Refuses new requests, and new connections at shared addresses. Running requests continue. Idempotent."""
        if self.served.state is not State.DRAINING:
            log_lifecycle("draining", requests=self.served.num_requests)
        self.served.drain()
        self._health.update()
        if self._shared is not None and self._leaving is None:
            # This asks clients to connect again. Their new connections go to another process.
            longest_s = self._config.security.age_grace_s or _FOREVER_MS / 1000
            self._leaving = asyncio.create_task(self._shared.stop(longest_s))

    async def stop(self, grace_s: float, delay_s: float = 0.0) -> None:
        """Stops the server. Idempotent.

        The server accepts requests for ``delay_s`` more seconds while health reports NOT_SERVING. Running requests then
        have ``grace_s`` seconds to end. The remaining requests fail, and the server closes.
        """
        if delay_s and self.served.state is State.READY and self._following is not None:
            log_lifecycle("leaving", delay_s=delay_s)
            self._health.leave()
            # The task ends early if the engine fails.
            await asyncio.wait({self._following}, timeout=delay_s)
        await self.drain()
        for task in (self._following, self._watching, self._trimming, self._guarding):
            if task is not None:
                task.cancel()
        await self.models.close()
        engines = self.served.engines
        if engines:
            await self.profiles.close()
            if self.served.num_requests:
                logger.info("waiting up to %g s for %d requests", grace_s, self.served.num_requests)
            await asyncio.gather(*(engine.shutdown(grace_s=grace_s) for engine in engines))
        if not await self._in_flight.wait_idle(LAST_WORDS_S):
            logger.warning("%d calls were aborted", self._in_flight.count)
        if self._http is not None:
            await self._http.stop()
        for server in self._servers:
            # This also ends health's Watch streams, which never end by themselves.
            await server.stop(None)
        if self._leaving is not None:
            await self._leaving
        await self.capture.stop()
        if self._shared_images is not None:
            await self._shared_images.close()
        for address in self.addresses:
            close_address(address)
        if self.telemetry is not None:
            await self.telemetry.close()
        if self._started_at is not None:
            log_lifecycle("stopped", served_s=round(clock.now() - self._started_at, 3))
            self._started_at = None


def _channel_options(
    received_bytes: int, sent_bytes: int, security: SecurityConfig, shared: bool
) -> list[tuple[str, int]]:
    limits = security.connections
    return [
        ("grpc.max_receive_message_length", min(received_bytes, _FOREVER_MS)),
        ("grpc.max_send_message_length", sent_bytes),
        # gRPC's core would decompress a message before memory for it is reserved (edge/messages/inflating.py).
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
    """What differs on the front's socket. A few connections carry all calls, and the front asks clients to connect
    again."""
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
