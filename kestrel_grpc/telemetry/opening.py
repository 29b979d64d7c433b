"""Telemetry: passes the events of calls and of the engine to tracing and metrics. An error here never fails a call.

This module imports OpenTelemetry only if the configuration exports something.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from kestrel_engine import EngineInfo, ImageEvent, InferenceEngine, RequestEvent, StepEvent

from ..edge.calls.call import Call
from ..settings.sources import SettingsError
from ..settings.telemetry import TelemetryConfig, missing_packages
from . import names

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..images.shared.shared_images import SharedImageEvent
    from ..security.admission.guard import Guard
    from .metrics import ServiceMetrics
    from .metrics_port import MetricsPort
    from .tracing import CallTracing

logger = logging.getLogger(__name__)

_EXEMPLARS = "OTEL_METRICS_EXEMPLAR_FILTER"
_AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_EXPLICIT = "explicit_bucket_histogram"
FLUSH_S = 5.0
"""How long a stopping server waits for its last spans and metrics to be exported."""


class Usage(Protocol):
    """Receives each request of the engine that has ended, with the name of its model."""

    def on_request(self, event: RequestEvent, model: str) -> None: ...


class Telemetry:
    """Receives events of calls from the interceptor, and of the engine as its Observer. ``open_telemetry`` makes it."""

    def __init__(
        self,
        tracing: CallTracing | None,
        metrics: ServiceMetrics | None,
        endpoint: MetricsPort | None,
        shutdowns: list[Callable[[], object]],
        registry: CollectorRegistry | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._tracing, self._metrics = tracing, metrics
        has_exemplars = metrics is not None and os.environ.get(_EXEMPLARS) != "always_off"
        self._exemplars = tracing if has_exemplars else None
        """What names the calls of exemplars; None if there are no exemplars."""
        self._endpoint, self._registry = endpoint, registry
        self._shutdowns = shutdowns
        self._usage, self._default = usage, ""
        self._counts = False
        self._complained: set[str] = set()

    @property
    def metrics_address(self) -> str | None:
        """The address of the Prometheus endpoint; None if there is none."""
        return None if self._endpoint is None else self._endpoint.address

    @property
    def is_scraped(self) -> bool:
        """Whether ``exposition`` has metrics."""
        return self._registry is not None

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics in Prometheus' text form, and its content type. ``accept``: the scraper's header of this name.

        Takes milliseconds. Any thread may call it.
        """
        from prometheus_client.exposition import choose_encoder

        assert self._registry is not None, "is_scraped says whether there is one"
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    @property
    def num_open_traces(self) -> int:
        """Sampled calls that have not ended."""
        return 0 if self._tracing is None else self._tracing.num_open

    def ready(self, engine: InferenceEngine, load_s: float) -> None:
        """The engine accepts requests. Steps and requests before this call, those of the warm-up, do not count."""
        self.start_counting()
        self._default = engine.info.model
        if self._tracing is not None:
            self._tracing.ready(engine.info)
        if self._metrics is not None:
            self._metrics.ready(engine, load_s)

    def add_model(self, engine: InferenceEngine, load_s: float) -> None:
        """A model that is not the default accepts requests."""
        if self._metrics is not None:
            self._metrics.add_model(engine, load_s)

    def remove_model(self, model: str) -> None:
        """A model was unloaded."""
        if self._metrics is not None:
            self._metrics.remove_model(model)

    def start_counting(self) -> None:
        """Counts steps and requests from now on."""
        self._counts = True

    def begin(self, call: Call) -> None:
        if self._tracing is not None:
            self._tell("begin", self._tracing, call)

    def on_message(self, call: Call) -> None:
        if self._tracing is not None:
            self._tell("on_message", self._tracing, call)

    def end(self, call: Call) -> None:
        try:
            if self._metrics is not None:
                self._metrics.on_call(call)
        except Exception:
            self._complain("on_call")
        if self._tracing is not None:
            self._tell("end", self._tracing, call)

    def on_step(self, event: StepEvent) -> None:
        if self._counts:
            span = None if self._exemplars is None else self._exemplars.span_of_step(event)
            self._tell("on_step", self._metrics, event, span)
            self._tell("on_step", self._tracing, event)

    def on_request(self, event: RequestEvent, info: EngineInfo | None = None) -> None:
        """``info``: of the engine of a model that is not the default."""
        if self._counts:
            span = None if self._exemplars is None else self._exemplars.span_of_request(event)
            try:
                if self._metrics is not None:
                    self._metrics.on_request(event, None if info is None else info.model, span)
            except Exception:
                self._complain("on_request")
            if self._tracing is not None:
                self._tell("on_request", self._tracing, event, info)
            if self._usage is not None:
                self._tell("on_request", self._usage, event, info.model if info else self._default)

    def on_image(self, event: ImageEvent) -> None:
        if self._counts:
            self._tell("on_image", self._metrics, event)
            self._tell("on_image", self._tracing, event)

    def show_audit(self, waiting: Callable[[], int]) -> None:
        """Shows how many records of administrative calls wait to be written."""
        self._tell("show_audit", self._metrics, waiting)

    def show_shared_images(self, is_used: Callable[[], bool]) -> None:
        """Shows whether the store of shared images is used."""
        self._tell("show_shared_images", self._metrics, is_used)

    def on_shared_image(self, event: SharedImageEvent) -> None:
        self._tell("on_shared_image", self._metrics, event)

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Exports the remaining spans and metrics within ``timeout_s`` seconds, and closes. Idempotent."""
        from .providers import within

        shutdowns, self._shutdowns = self._shutdowns, []
        if shutdowns and not await within(timeout_s, *shutdowns):
            logger.warning("the last spans and metrics were not exported in %g s", timeout_s)

    def _tell(
        self, what: str, part: ServiceMetrics | CallTracing | Usage | None, *args: object
    ) -> None:
        """Calls a method of one part. Its error must not fail a call; it is logged once."""
        try:
            if part is not None:
                getattr(part, what)(*args)
        except Exception:
            self._complain(what)

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.exception("telemetry failed in %s; further failures there are not logged", what)


class ModelObserver:
    """The Observer of the engine of a model that is not the default: its requests have the model's name. Steps and
    images of all models are counted together."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._info: EngineInfo | None = None

    def ready(self, engine: InferenceEngine, load_s: float) -> None:
        """The engine accepts requests. Events before this call, those of the warm-up, do not count."""
        self._info = engine.info
        self._telemetry.add_model(engine, load_s)

    def on_step(self, event: StepEvent) -> None:
        if self._info is not None:
            self._telemetry.on_step(event)

    def on_request(self, event: RequestEvent) -> None:
        if self._info is not None:
            self._telemetry.on_request(event, self._info)

    def on_image(self, event: ImageEvent) -> None:
        if self._info is not None:
            self._telemetry.on_image(event)


def open_telemetry(
    config: TelemetryConfig,
    guard: Guard,
    num_calls: Callable[[], int],
    is_ready: Callable[[], bool],
    ended: Callable[[], Mapping[str, int]],
    usage: Usage | None = None,
) -> Telemetry | None:
    """Creates tracing, metrics and exporters. ``guard``, ``num_calls``, ``is_ready``, ``ended``: as for ServiceMetrics.

    Without ``usage``, returns None if the configuration exports nothing or a package is missing; the latter is logged.
    Call this in the process that serves, because exporters start threads.

    Raises AddressError if the Prometheus endpoint cannot or must not listen, TlsError and TokenFileError, and
    SettingsError if OpenTelemetry rejects an OTEL_* variable.
    """
    uncounted = None if usage is None else Telemetry(None, None, None, [], usage=usage)
    if not config.traces and not config.measures:
        return uncounted
    missing = missing_packages(config)
    if missing:
        logger.warning(
            "telemetry is off: %s is not installed; install it with pip install ./clients/python '.[telemetry]'",
            ", ".join(missing),
        )
        return uncounted
    with _named_variables():
        from . import providers  # The SDK reads some variables when it is imported.

    shutdowns: list[Callable[[], object]] = []
    tracing = metrics = endpoint = reader = registry = None
    if config.is_scraped:
        from prometheus_client import CollectorRegistry

        from .prometheus import Scrape
        from .readers import PullReader

        reader, registry = PullReader(), CollectorRegistry()
        registry.register(Scrape(reader, config.worker))
    if config.prometheus is not None:
        # This comes before tracing and metrics because it may fail, and they start threads.
        from prometheus_client import make_wsgi_app

        from ..security.metrics_door import MetricsDoor
        from .metrics_port import MetricsPort

        assert registry is not None, "is_scraped says so"
        door = MetricsDoor(config.prometheus, guard.security)
        endpoint = MetricsPort(config.prometheus, make_wsgi_app(registry), door)
        logger.info("metrics at %s://%s/metrics", endpoint.scheme, endpoint.address)
    if config.traces:
        with _named_variables():
            from .tracing import CallTracing

            made = providers.tracers(config)
        tracing = CallTracing(
            made.requests.get_tracer(names.SCOPE),
            made.steps.get_tracer(names.SCOPE),
            sampling=made.requests.sampler.get_description(),
            content=config.content,
        )
        shutdowns += made.shutdowns
    if config.measures:
        from .metrics import ServiceMetrics

        with _named_variables():
            meter_provider, readers = providers.meters(config, reader)
        metrics = ServiceMetrics(
            meter_provider.get_meter(names.SCOPE), num_calls, is_ready, guard, ended
        )
        if (asked := os.environ.get(_AGGREGATION) or _EXPLICIT) != _EXPLICIT:
            logger.warning(
                "%s=%s does not apply: histograms have fixed buckets", _AGGREGATION, asked
            )
        for each in readers:
            each.dense, each.changing = metrics.histograms, metrics.lora_info
        shutdowns.append(meter_provider.shutdown)
    if endpoint is not None:
        shutdowns.append(endpoint.close)
    return Telemetry(tracing, metrics, endpoint, shutdowns, registry, usage)


@contextlib.contextmanager
def _named_variables() -> Iterator[None]:
    """Raises an error of code that reads OTEL_* variables as SettingsError."""
    try:
        yield
    except Exception as error:
        # The SDK documents neither its exceptions nor which variable caused one.
        variables = sorted(name for name in os.environ if name.startswith("OTEL_"))
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(
            f"OpenTelemetry cannot start: {reason} (variables that are set: {', '.join(variables)})"
        ) from error
