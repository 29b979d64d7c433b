"""ServerParts: what a server consists of, made from its settings in one place. Knows no order of start and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from kestrel_engine import RuntimeConfig

from ..batches.running import BatchRunner
from ..batches.service import ENDPOINT, BatchService, TypedRequests
from ..batches.store import BatchStore
from ..edge.call_life import InFlight
from ..http.services import HttpServices
from ..images.request_images import RequestImages
from ..images.store import ImageStore
from ..images.upload import UploadRoom
from ..kserve.service import InferenceService
from ..monitoring.audit import AuditLog
from ..monitoring.call_records import CallRecords
from ..security.admission.guard import Guard
from ..security.budget_ledger import BudgetLedger
from ..served_model import ServedModel, ServedModels
from ..service_names import (
    ADMIN_SERVICE,
    BATCH_SERVICE,
    IMAGE_SERVICE,
    KSERVE_SERVICE,
    MODEL_SERVICE,
    VISION_SERVICE,
)
from ..services import health
from ..services.image import ImageService
from ..services.model import ModelService
from ..services.vision import VisionService
from ..settings.budgets import token_budget
from ..settings.server import ServerConfig
from .interpreter import follow_heap
from .open_files import FileWatch


class SideTask(NamedTuple):
    """What runs beside the calls. ``end``: comes after the last call, also if ``run`` never began."""

    run: Callable[[], Coroutine[Any, Any, None]]
    end: Callable[[], Awaitable[None]] | None = None


class ServerParts:
    def __init__(
        self,
        config: ServerConfig,
        runtimes: Sequence[RuntimeConfig],
        tcp_ports: Callable[[], frozenset[int]],
    ) -> None:
        """``runtimes``: of the models, the default one first. ``tcp_ports``: those that the server listens on. Raises
        TokenFileError, ConfigError."""
        self._config = config
        self.served = served = ServedModels(*map(ServedModel, runtimes))
        self.images = ImageStore(config.image_store_bytes)
        """The images stored for later requests."""
        most_bytes = runtimes[0].image_limits.max_bytes
        self.uploads = UploadRoom(max(config.image_store_bytes, most_bytes))
        worker = config.telemetry.worker
        audit = None if config.audit_log is None else AuditLog(config.audit_log, worker)
        self.guard = guard = Guard(
            *(config.security, config.max_message_bytes),
            served.check_room,
            tcp_ports,
            check_audit=None if audit is None else audit.check,
        )
        self.records = CallRecords(config, served, audit)
        self.in_flight = InFlight()
        files = FileWatch()
        self._health = health.Health(
            served,
            lambda: files.is_crowded,
            following=(VISION_SERVICE, IMAGE_SERVICE, KSERVE_SERVICE),
            others=(MODEL_SERVICE, BATCH_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME),
        )
        self.batches: BatchRunner | None = None
        """None if the server takes no batches."""
        self._side_tasks = [
            SideTask(lambda: files.follow(self._health.update)),
            SideTask(lambda: follow_heap(guard.take_freed_bytes)),
            SideTask(guard.connections.run),
        ]
        if (usage := self.records.usage) is not None:
            self._side_tasks.append(SideTask(usage.run, usage.write))
        if path := token_budget(config.security.calls.token_budget).file:
            guard.budgets.ledger = BudgetLedger(path)
        if config.batches.path is not None:
            store = BatchStore(config.batches)
            self.batches = batches = BatchRunner(
                store, config.batches.at_once, lambda: guard.num_asked
            )
            self._side_tasks.append(SideTask(batches.run, batches.close))

    def _services(self, images: RequestImages) -> HttpServices:
        config, served = self._config, self.served
        vision = VisionService(served, images, config.max_message_bytes)
        if self.batches is not None:
            self.batches.forms[ENDPOINT] = TypedRequests(vision)
        return HttpServices(
            vision,
            ImageService(served, images, self.uploads, config.upload_idle_s),
            ModelService(
                served,
                self.records.load_meter,
                max_message_bytes=config.max_message_bytes,
                image_store_bytes=config.image_store_bytes,
            ),
            InferenceService(served, vision, self.records.statistics),
            BatchService(self.batches),
            served,
        )
