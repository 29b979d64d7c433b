"""TelemetryConfig: which telemetry to export, and where.

This module reads the OTEL_* variables that choose exporters. OpenTelemetry's SDK reads the other variables.
The server exports traces if OTEL_TRACES_EXPORTER names an exporter or if an OTLP endpoint is set. The same holds for
metrics. The Prometheus endpoint has a flag instead. This module does not import OpenTelemetry.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from kestrel_engine import SettingGroup

from .addresses import parse_address

TELEMETRY = SettingGroup("telemetry", "telemetry")

Exporter = Literal["otlp", "console"]
Protocol = Literal["grpc", "http/protobuf"]

_NAMED_PROTOCOLS: dict[str, Protocol] = {
    "otlp_proto_grpc": "grpc",
    "otlp_proto_http": "http/protobuf",
}
_EXPORTERS: dict[str, Exporter] = {
    "otlp": "otlp",
    "console": "console",
    # Names of OpenTelemetry's Python SDK, and the old name of console.
    **dict.fromkeys(_NAMED_PROTOCOLS, "otlp"),
    "logging": "console",
}
_PROTOCOLS = ("grpc", "http/protobuf")
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CONTENT_ON = frozenset({"true", "span_only", "span_and_event"})
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The default exports nothing."""

    traces: tuple[Exporter, ...] = ()
    traces_protocol: Protocol = "grpc"
    metrics: tuple[Exporter, ...] = ()
    metrics_protocol: Protocol = "grpc"
    prometheus: str | None = TELEMETRY.setting(
        None,
        "address at which Prometheus scrapes metrics: HOST:PORT; needs the extra telemetry",
        flag="--metrics-listen",
        parse=parse_address,
        metavar="ADDRESS",
        shown="off",
    )
    by_http: bool = False
    """Whether the HTTP port serves the metrics too. Not a setting: ``with_http`` sets it."""
    worker: int | None = None
    """This process's index among several workers, a label of the Prometheus metrics; None without workers."""
    content: bool = False
    """Whether spans hold questions and answers."""
    span_queue: int | None = 8192
    """Spans that may wait for export; None leaves the value to OTEL_BSP_MAX_QUEUE_SIZE."""
    span_delay_ms: float | None = 1000.0
    """Milliseconds between exports; None leaves the value to OTEL_BSP_SCHEDULE_DELAY."""

    @property
    def measures(self) -> bool:
        return bool(self.metrics) or self.is_scraped

    @property
    def is_scraped(self) -> bool:
        """Whether Prometheus may read the metrics at one of the server's ports."""
        return self.prometheus is not None or self.by_http


def telemetry_config(environ: Mapping[str, str], prometheus: str | None = None) -> TelemetryConfig:
    """The configuration from the OTEL_* variables and the value of --metrics-listen, ``prometheus``.

    Raises ValueError, which names the flag or variable, for an unknown exporter or protocol or a missing package.
    """
    if prometheus is not None:
        _check_prometheus(prometheus)
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryConfig(prometheus=prometheus)
    if prometheus is None and "prometheus" in _named(environ, "METRICS"):
        raise ValueError(
            "OTEL_METRICS_EXPORTER='prometheus': needs --metrics-listen, which sets the address"
        )
    return TelemetryConfig(
        traces=_exporters(environ, "TRACES"),
        traces_protocol=_protocol(environ, "TRACES"),
        metrics=_exporters(environ, "METRICS"),
        metrics_protocol=_protocol(environ, "METRICS"),
        prometheus=prometheus,
        content=environ.get(_CONTENT, "").strip().lower() in _CONTENT_ON,
        span_queue=None if environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else 8192,
        span_delay_ms=None if environ.get("OTEL_BSP_SCHEDULE_DELAY") else 1000.0,
    )


def with_http(config: TelemetryConfig) -> TelemetryConfig:
    """``config`` with metrics on the HTTP port, if the packages for it are installed."""
    if missing_packages(TelemetryConfig(by_http=True)):
        return config
    return replace(config, by_http=True)


def _check_prometheus(address: str) -> None:
    if address.startswith("unix:"):
        raise ValueError(f"--metrics-listen={address}: must be HOST:PORT or [IPV6]:PORT")
    missing = missing_packages(TelemetryConfig(prometheus=address))
    if missing:
        raise ValueError(
            f"--metrics-listen={address}: {', '.join(missing)} is not installed; "
            "install it with pip install ./clients/python '.[telemetry]'"
        )


def missing_packages(config: TelemetryConfig) -> tuple[str, ...]:
    """The packages that ``config`` needs and that are not installed."""
    wanted: list[str] = []
    if config.traces or config.measures:
        wanted.append("opentelemetry.sdk")
    if config.is_scraped:
        wanted.append("prometheus_client")
    for exporters, protocol in (
        (config.traces, config.traces_protocol),
        (config.metrics, config.metrics_protocol),
    ):
        if "otlp" in exporters:
            kind = "grpc" if protocol == "grpc" else "http"
            wanted.append(f"opentelemetry.exporter.otlp.proto.{kind}")
    return tuple(name for name in dict.fromkeys(wanted) if not _installed(name))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # A parent package is not installed.
        return False


def _named(environ: Mapping[str, str], signal: str) -> list[str]:
    """The exporters that the variable lists."""
    exporters = environ.get(f"OTEL_{signal}_EXPORTER", "").lower().split(",")
    return [name.strip() for name in exporters if name.strip()]


def _exporters(environ: Mapping[str, str], signal: str) -> tuple[Exporter, ...]:
    names = _named(environ, signal)
    if not names:
        endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environ.get(_ENDPOINT)
        return ("otlp",) if endpoint else ()
    if names == ["none"]:
        return ()
    if signal == "METRICS":  # --metrics-listen configures it.
        names = [name for name in names if name != "prometheus"]
    for name in names:
        if name not in _EXPORTERS:
            why = (
                "must stand alone"
                if name == "none"
                else f"must be one of none, {', '.join(_EXPORTERS)}"
            )
            raise ValueError(f"OTEL_{signal}_EXPORTER={name!r}: {why}")
    return tuple(dict.fromkeys(_EXPORTERS[name] for name in names))


def _protocol(environ: Mapping[str, str], signal: str) -> Protocol:
    named = {_NAMED_PROTOCOLS[name] for name in _named(environ, signal) if name in _NAMED_PROTOCOLS}
    if len(named) > 1:
        raise ValueError(f"OTEL_{signal}_EXPORTER: names two protocols of OTLP; name one")
    for protocol in named:
        return protocol
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        name = environ.get(variable, "").strip().lower()
        if name:
            if name not in _PROTOCOLS:
                raise ValueError(f"{variable}={name!r}: must be one of {', '.join(_PROTOCOLS)}")
            return cast(Protocol, name)
    return "grpc"
