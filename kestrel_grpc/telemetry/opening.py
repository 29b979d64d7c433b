"""Telemetry: what the server calls. Owns tracing, metrics and their exporters; measuring never fails a call.

Imports OpenTelemetry only when something is to be exported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from kestrel_engine import ImageEvent, InferenceEngine, RequestEvent, StepEvent

from ..edge.call import Call
from ..settings.sources import SettingsError
from ..settings.telemetry import TelemetryConfig, missing_packages
from . import names
from .edge_counts import EdgeCounts

if TYPE_CHECKING:
    from ..settings.security import SecurityConfig
    from .metrics import ServiceMetrics
    from .prometheus import PrometheusEndpoint
    from .tracing import CallTracing

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""How long a stopping server waits for its last spans and metrics to be exported."""

_Args = ParamSpec("_Args")


def _harmless(
    method: Callable[Concatenate[Telemetry, _Args], None],
) -> Callable[Concatenate[Telemetry, _Args], None]:
    """Logs what the method raises."""

    @functools.wraps(method)
    def guarded(self: Telemetry, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # The measurement's edge: a call is worth more than its span.
            self.complain(method.__name__)

    return guarded


class Telemetry:
    """Watches calls (the interceptor's side) and the engine (its Observer). Made by ``open_telemetry``."""

    def __init__(
        self,
        tracing: CallTracing | None,
        metrics: ServiceMetrics | None,
        endpoint: PrometheusEndpoint | None,
        shutdowns: list[Callable[[], object]],
    ) -> None:
        self._tracing, self._metrics = tracing, metrics
        self._endpoint = endpoint
        self._shutdowns = shutdowns
        self._counts = False
        self._complained: set[str] = set()

    @property
    def metrics_address(self) -> str | None:
        """Where Prometheus may scrape."""
        return None if self._endpoint is None else self._endpoint.address

    @property
    def num_open_traces(self) -> int:
        """Sampled calls that have not ended."""
        return 0 if self._tracing is None else self._tracing.num_open

    def ready(self, engine: InferenceEngine, load_s: float) -> None:
        """The engine takes requests; what it did before, its warm-up, does not count."""
        self.start_counting()
        if self._tracing is not None:
            self._tracing.ready(engine.info)
        if self._metrics is not None:
            self._metrics.ready(engine, load_s)

    def start_counting(self) -> None:
        """From now on steps and requests count."""
        self._counts = True

    @_harmless
    def begin(self, call: Call) -> None:
        if self._tracing is not None:
            self._tracing.begin(call)

    @_harmless
    def take(self, call: Call, message: Any) -> None:
        if self._tracing is not None:
            self._tracing.take(call, message)

    @_harmless
    def end(self, call: Call) -> None:
        if self._metrics is not None:
            self._metrics.on_call(call)
        if self._tracing is not None:
            self._tracing.end(call)

    @_harmless
    def on_step(self, event: StepEvent) -> None:
        if not self._counts:
            return
        if self._metrics is not None:
            self._metrics.on_step(event)
        if self._tracing is not None:
            self._tracing.on_step(event)

    @_harmless
    def on_request(self, event: RequestEvent) -> None:
        if not self._counts:
            return
        if self._metrics is not None:
            self._metrics.on_request(event)
        if self._tracing is not None:
            self._tracing.on_request(event)

    @_harmless
    def on_image(self, event: ImageEvent) -> None:
        if not self._counts:
            return
        if self._metrics is not None:
            self._metrics.on_image(event)
        if self._tracing is not None:
            self._tracing.on_image(event)

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Exports what waits, for up to ``timeout_s`` seconds, and closes. Idempotent."""
        from .providers import within

        shutdowns, self._shutdowns = self._shutdowns, []
        if shutdowns and not await within(timeout_s, *shutdowns):
            logger.warning("the last spans and metrics were not exported in %g s", timeout_s)

    def complain(self, what: str) -> None:
        """Logs the current exception, once for each place."""
        if what not in self._complained:
            self._complained.add(what)
            logger.exception("telemetry failed in %s; said once", what)


def open_telemetry(
    config: TelemetryConfig,
    security: SecurityConfig,
    num_calls: Callable[[], int],
    is_ready: Callable[[], bool],
    edge: EdgeCounts | None = None,
) -> Telemetry | None:
    """None if nothing is to be exported, or its packages are missing, which is logged. To be called in the process that
    serves: exporters have threads. Raises AddressError where the Prometheus endpoint can't or won't listen, TlsError,
    TokenFileError, SettingsError where OpenTelemetry can't use the OTEL_* variables."""
    if config.traces == "none" and not config.measures:
        return None
    missing = missing_packages(config)
    if missing:
        logger.warning(
            "no telemetry: %s is not installed; the extra kestrel-grpc[telemetry] brings it",
            ", ".join(missing),
        )
        return None
    with _named_variables():
        from . import providers  # The SDK reads some variables as it is loaded.

    shutdowns: list[Callable[[], object]] = []
    tracing = metrics = endpoint = reader = None
    if config.prometheus is not None:  # First: it may fail, and the others have threads.
        from ..security.metrics_door import MetricsDoor
        from .dense import PullReader
        from .prometheus import PrometheusEndpoint

        reader = PullReader()
        door = MetricsDoor(config.prometheus, security)
        endpoint = PrometheusEndpoint(config.prometheus, reader, door, config.worker)
        logger.info("metrics at %s://%s/metrics", endpoint.scheme, endpoint.address)
    if config.traces != "none":
        with _named_variables():
            from .tracing import CallTracing

            made = providers.tracers(config)
        tracing = CallTracing(
            made.requests.get_tracer(names.SCOPE),
            made.steps.get_tracer(names.SCOPE),
            sampling=made.requests.sampler.get_description(),
            content=config.content,
        )
        shutdowns.append(made.shutdown)
    if config.measures:
        from .metrics import ServiceMetrics

        with _named_variables():
            meter_provider, readers = providers.meters(config, reader)
        metrics = ServiceMetrics(meter_provider.get_meter(names.SCOPE), num_calls, is_ready, edge)
        for each in readers:
            each.dense = metrics.token_gap
        shutdowns.append(meter_provider.shutdown)
    if endpoint is not None:
        shutdowns.append(endpoint.close)
    return Telemetry(tracing, metrics, endpoint, shutdowns)


@contextlib.contextmanager
def _named_variables() -> Iterator[None]:
    """Around what reads OTEL_* variables. Raises SettingsError."""
    try:
        yield
    except Exception as error:  # The SDK's: by what class, and of which variable, is told of few.
        given = sorted(name for name in os.environ if name.startswith("OTEL_"))
        told = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(
            f"OpenTelemetry can't start: {told} (of the environment it has {', '.join(given)})"
        ) from error
