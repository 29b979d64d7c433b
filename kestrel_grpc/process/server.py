"""KestrelServer: serves models by gRPC and HTTP. Owns the order of start and stop of its parts (parts.py).

Start: the server listens first, so that health checks get NOT_SERVING. Then it loads the models, one after the other,
and then it accepts requests.

Stop: health changes to NOT_SERVING. After an optional delay, new requests are refused with UNAVAILABLE while running
requests continue. At the end of the grace period, the remaining requests fail with UNAVAILABLE. Then the listeners
close.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kestrel_engine import InferenceEngine, RuntimeConfig, clock

from ..edge.call_life import CallLife
from ..edge.methods import Methods
from ..edge.request_streams import StreamKind
from ..http.opening import open_http
from ..images.request_images import RequestImages
from ..images.shared.shared_images import SharedImages
from ..kserve import service as kserve
from ..logs.records import log_lifecycle
from ..model_changes import LoadModel, ModelChanges
from ..security.files import exposures
from ..security.identity.tls import server_credentials
from ..security.listening import check_exposure
from ..served_model import State
from ..service_names import KSERVE_METHODS, VISION_METHODS
from ..services.admin import AdminService
from ..services.answers.frames import FRAMES
from ..settings.addresses import unix_path
from ..settings.server import ServerConfig
from ..settings.telemetry import with_http
from ..telemetry.opening import Telemetry, open_telemetry
from .grpc_ports import GrpcPorts, add_services
from .parts import ServerParts

if TYPE_CHECKING:
    from ..http.port.listener import HttpListener

logger = logging.getLogger(__name__)


LAST_WORDS_S = 2.0
"""Seconds that a draining server waits for calls to send their status after their requests have ended."""

LoadEngine = Callable[[], Awaitable[InferenceEngine]]


@dataclass(slots=True, kw_only=True)
class _Opened:
    """What ``start`` opens and ``stop`` closes."""

    ports: GrpcPorts
    http: HttpListener | None
    shared_images: SharedImages | None
    beside: list[asyncio.Task[None]] = field(default_factory=list)
    """The tasks that run beside the calls."""
    following: asyncio.Task[None] | None = None
    """Ends early if the default model's engine fails."""
    started_at: float | None = None
    """None before all is open, and after the end."""


class KestrelServer(ServerParts):
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
        these, and models that come later. Raises TokenFileError, ConfigError."""
        super().__init__(config, (runtime, *others), self._tcp_ports)
        self._load_engine = load_engine
        self.load_seconds = 0.0
        self.telemetry: Telemetry | None = None
        """Set by ``start``: receives events of calls, and must be the engine's observer. None without telemetry."""
        self.models = ModelChanges(
            self.served,
            load_model,
            self._health.update,
            config.model_folders,
            lambda: self.telemetry,
        )
        """Loads and unloads models while the server runs."""
        self._opened: _Opened | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that the server listens on, with the assigned ports in place of port 0."""
        return () if self._opened is None else self._opened.ports.addresses

    @property
    def own_addresses(self) -> tuple[str, ...]:
        """Those of ``addresses`` that no other process shares."""
        return () if self._opened is None else self._opened.ports.own_addresses

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """What the server listens on for HTTP, with the ports that it was given for port 0."""
        http = None if self._opened is None else self._opened.http
        return () if http is None else http.addresses

    @property
    def shares_images(self) -> bool:
        """Whether the store of shared images is used: one is set, and it has not failed lately."""
        shared = None if self._opened is None else self._opened.shared_images
        return shared is not None and shared.breaker.is_closed

    async def start(self) -> None:
        """Starts to listen. Requests get UNAVAILABLE until ``load`` has finished. Raises AddressError, TlsError."""
        config, security = self._config, self._config.security
        for exposure in exposures(security):
            logger.warning("%s", exposure)
        check_exposure((*config.listen, *config.shared_listen), security)
        credentials = None if security.tls is None else server_credentials(security.tls)
        self.telemetry = telemetry = self._open_telemetry()
        audit = self.records.audit
        if telemetry is not None and audit is not None:
            telemetry.show_audit(lambda: audit.waiting)
        shared = SharedImages.open(
            config.shared_images,
            (lambda event: None) if telemetry is None else telemetry.on_shared_image,
        )
        if shared is not None:
            shared.start()
            if telemetry is not None:
                telemetry.show_shared_images(lambda: self.shares_images)
        watchers = self.records.watchers(telemetry)
        services = self._services(RequestImages(self.images, shared))
        reports = self.records.load_reports if config.orca else None
        parts = (self.guard, self.guard.connections, self.in_flight, watchers)
        life = CallLife(*parts)
        if self.batches is not None:
            # A request may wait behind many others, until its batch expires.
            self.batches.life = CallLife(*parts, is_limited=False)
        methods = Methods(
            life,
            None if reports is None else reports.trailer,
            {
                f"{KSERVE_METHODS}ModelStreamInfer": StreamKind(kserve.refuse),
                f"{VISION_METHODS}StreamFrames": FRAMES,
            },
        )
        add_services(methods, services, self._admin_service(), self._health, reports)
        self._health.update()
        http = None
        if config.http.http_listen:
            http = open_http(
                *(config.http, security, services, self.in_flight, self.guard),
                *(watchers, telemetry, self.batches),
            )
        ports = GrpcPorts(
            config,
            self.guard.messages.received,
            methods,
            lambda: self._health.is_serving,
            credentials,
        )
        self._opened = _Opened(ports=ports, http=http, shared_images=shared)
        if http is not None:
            await http.start()
            log_lifecycle("listening", addresses=http.addresses, protocol="http")
        if config.listen:
            await ports.open(config.listen)
        if config.front_listen is not None:
            await ports.open((config.front_listen,), front=True)
        self._opened.beside += [asyncio.create_task(each.run()) for each in self._side_tasks]
        self._opened.started_at = clock.now()

    def _open_telemetry(self) -> Telemetry | None:
        config = self._config
        return open_telemetry(
            with_http(config.telemetry) if config.http.http_listen else config.telemetry,
            self.guard,
            num_calls=lambda: self.in_flight.count,
            is_ready=lambda: self.served.state is State.READY,
            ended=self.ended_connections,
            usage=self.records.usage,
        )

    def _admin_service(self) -> AdminService:
        records = self.records
        return AdminService(
            *(self.served, self.images, self.guard, self.drain),
            *(records.profiles, records.capture, records.statistics),
            *(self.models, self._config.grace_s),
        )

    def ended_connections(self) -> Counter[str]:
        """By reason, of both ports."""
        ended = Counter(self.guard.connections.ended)
        if self._opened is not None and self._opened.http is not None:
            ended.update(self._opened.http.ended)
        return ended

    def _tcp_ports(self) -> frozenset[int]:
        tcp = (address for address in self.addresses if unix_path(address) is None)
        return frozenset(int(address.rpartition(":")[2]) for address in tcp)

    async def load(self) -> InferenceEngine:
        """Loads the models and accepts requests. Returns the default model's engine.

        Raises ConfigError, ModelLoadError, AddressError.
        """
        assert self._opened is not None, "start() comes first"
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
            await self._opened.ports.open(self._config.shared_listen, shared=True)
        self._opened.following = asyncio.create_task(self._health.follow())
        if self.served.state is State.READY:
            info, seconds = engine.info, round(self.load_seconds, 3)
            log_lifecycle(
                "ready", model=info.model, device=info.device, dtype=info.precision, load_s=seconds
            )
        return engine

    async def drain(self) -> None:
        """Refuses new requests, and new connections at shared addresses. Running requests continue. Idempotent."""
        if self.served.state is not State.DRAINING:
            log_lifecycle("draining", requests=self.served.num_requests)
        self.served.drain()
        self._health.update()
        if self._opened is not None:
            self._opened.ports.leave()

    async def stop(self, grace_s: float, delay_s: float = 0.0) -> None:
        """Stops the server. Idempotent.

        The server accepts requests for ``delay_s`` more seconds while health reports NOT_SERVING. Running requests then
        have ``grace_s`` seconds to end. The remaining requests fail, and the server closes.
        """
        opened = self._opened
        following = None if opened is None else opened.following
        if delay_s and self.served.state is State.READY and following is not None:
            log_lifecycle("leaving", delay_s=delay_s)
            self._health.leave()
            await asyncio.wait({following}, timeout=delay_s)
        await self.drain()
        for task in () if opened is None else (*opened.beside, following):
            if task is not None:
                task.cancel()
        await self.models.close()
        engines = self.served.engines
        if engines:
            await self.records.profiles.close()
            if self.served.num_requests:
                logger.info("waiting up to %g s for %d requests", grace_s, self.served.num_requests)
            await asyncio.gather(*(engine.shutdown(grace_s=grace_s) for engine in engines))
        if not await self.in_flight.wait_idle(LAST_WORDS_S):
            logger.warning("%d calls were aborted", self.in_flight.count)
        if opened is not None and opened.http is not None:
            await opened.http.stop()
        if opened is not None:
            await opened.ports.close()
        await self.records.capture.stop()
        for beside in self._side_tasks:
            if beside.end is not None:
                await beside.end()
        if opened is not None and opened.shared_images is not None:
            await opened.shared_images.close()
        if self.telemetry is not None:
            await self.telemetry.close()
        if opened is not None and opened.started_at is not None:
            log_lifecycle("stopped", served_s=round(clock.now() - opened.started_at, 3))
            opened.started_at = None
