"""ServerConfig: what the server itself needs to know. The engine's part is RuntimeConfig.

Each field describes its own flag, variable and key (kestrel_engine.settings): a new knob is one field.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, field
from typing import Literal

from kestrel_engine import SettingGroup, check_settings, setting

from .addresses import DEFAULT_ADDRESS, parse_address
from .debug import DebugConfig
from .flags import SettingsError, configured, size
from .logs import DEFAULT_BUFFER_BYTES, LEAST_BUFFER_BYTES, checked_levels
from .security import SecurityConfig
from .sources import name_of
from .telemetry import TELEMETRY, TelemetryConfig, telemetry_config
from .workers import WorkersConfig

COMPRESSIONS = ("off", "low", "medium", "high")
"""gRPC's levels: the algorithm depends on what the caller accepts. A fixed algorithm would be sent to every caller."""

MIB = 1024 * 1024
_PLUGIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_DRAIN_DELAY_S = 5.0
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container."""
_LARGEST_MESSAGE = 2**31 - 1
"""gRPC counts a message's bytes in 32 bits."""

SERVER = SettingGroup("server", "server")
LOG = SettingGroup("log", "log")


def _addresses(text: str) -> list[str]:
    return [parse_address(part.strip()) for part in text.split(",")]


def _plugins(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(_PLUGIN.fullmatch(name) for name in names):
        raise ValueError("must be PACKAGE.MODULE:CLASS")
    return names


def _buffer_bytes(text: str) -> int:
    """Raises ValueError."""
    num_bytes = size(text)
    if num_bytes < LEAST_BUFFER_BYTES:
        raise ValueError(f"must be at least {LEAST_BUFFER_BYTES}")
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ConfigError naming field, value and limit."""

    listen: tuple[str, ...] = setting(
        (DEFAULT_ADDRESS,),
        SERVER,
        "where to listen: HOST:PORT, [IPV6]:PORT or unix:PATH; may be given several times, or several with commas",
        parse=_addresses,
        repeated=True,
        distinct=True,
        metavar="ADDRESS",
        shown=DEFAULT_ADDRESS,
    )
    """Loopback by default: beyond it, ``security`` must be set up."""
    shared_listen: tuple[str, ...] = ()
    """TCP addresses that other processes listen on too, each on its own socket (SO_REUSEPORT); only while requests are
    answered. Not a setting: a supervisor gives them to its workers."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    max_message_bytes: int = setting(
        33 * MIB,
        SERVER,
        "largest message, either way",
        kind="bytes",
        metavar="SIZE",
        low=1,
        high=_LARGEST_MESSAGE,
    )
    """The largest image allowed (32 MiB), or raw pixels of an 11 megapixel one, and 1 MiB for the rest."""
    compression: Literal["off", "low", "medium", "high"] = setting(
        "off",
        SERVER,
        "compress answers for callers that accept it: for slow networks, it costs CPU",
        choices=COMPRESSIONS,
    )
    image_store_bytes: int = setting(
        256 * MIB,
        SERVER,
        "images stored for requests that name them by id, unused ones dropped first; 0 stores none",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    upload_idle_s: float = setting(
        10.0,
        SERVER,
        "cancel an upload that receives no data for this long, because it holds memory",
        kind="seconds",
        metavar="SECONDS",
        low=0.1,
    )
    skills: tuple[str, ...] = setting(
        (),
        SERVER,
        "a skill to serve besides the model's own (RunSkill); may be given several times, or several with commas",
        flag="--skill",
        parse=_plugins,
        repeated=True,
        distinct=True,
        metavar="MODULE:CLASS",
        shown="none",
    )
    grace_s: float = setting(
        30.0,
        SERVER,
        "how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends them",
        kind="seconds",
        metavar="SECONDS",
        low=0,
    )
    """The default is Kubernetes' own."""
    drain_delay_s: float | None = setting(
        None,
        SERVER,
        "how long new requests are still accepted after SIGTERM, before --grace, while health reports NOT_SERVING, so "
        "that load balancers notice",
        kind="seconds",
        metavar="SECONDS",
        low=0,
        shown="5, or --grace if that is less; 0 in Kubernetes",
    )
    orca: bool = setting(False, TELEMETRY, "load reports in trailers, for balancers")
    access_log: Literal["off", "text", "json"] = setting(
        "off",
        LOG,
        "write a line for each request: text (also if no format is named) or json",
        choices=("off", "text", "json"),
        bare="text",
    )
    log_format: Literal["text", "json"] = setting(
        "text",
        LOG,
        "form of all log records; json writes one object a line",
        choices=("text", "json"),
    )
    log_level: str = setting(
        "info",
        LOG,
        "least urgent messages to log, on standard error: debug, info, warning or error, then other levels for "
        "single modules, like info,kestrel_engine.steps.loop=debug",
        parse=checked_levels,
        metavar="LEVELS",
    )
    log_buffer_bytes: int = setting(
        DEFAULT_BUFFER_BYTES,
        LOG,
        "most bytes of log lines that may wait to be written; further lines are dropped and counted",
        kind="bytes",
        parse=_buffer_bytes,
        metavar="SIZE",
        low=LEAST_BUFFER_BYTES,
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def leaving_s(self) -> float:
        """``drain_delay_s``, or its default: seconds within which a load balancer that asks every 2 s has noticed. In
        Kubernetes a preStop hook waits instead, before the signal comes (deploy/kubernetes)."""
        if self.drain_delay_s is not None:
            return self.drain_delay_s
        return 0.0 if os.environ.get(_IN_KUBERNETES) else min(_DRAIN_DELAY_S, self.grace_s)


def server_config(args: argparse.Namespace, security: SecurityConfig | None = None) -> ServerConfig:
    """``security``: by default none is set up. Raises SettingsError."""
    workers = configured(WorkersConfig, args)
    if workers.devices and getattr(args, "device", "auto") != "auto":
        raise SettingsError(
            f"{name_of(args, '--devices')} and {name_of(args, '--device')}: give one of the two"
        )
    try:
        telemetry = telemetry_config(os.environ, args.metrics_listen)
    except ValueError as error:
        flag = "--metrics-listen"
        raise SettingsError(str(error).replace(flag, name_of(args, flag), 1)) from None
    return configured(
        ServerConfig,
        args,
        security=security or SecurityConfig(),
        telemetry=telemetry,
        workers=workers,
        debug=configured(DebugConfig, args),
    )
