"""ServerConfig: the server's own settings. RuntimeConfig holds the engine's.

Each field describes its flag, variable and key (kestrel_engine.config.setting). A new setting is one new field.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from kestrel_client.commands.flags import DEFAULT_ADDRESS
from kestrel_engine import ConfigError, SettingGroup, check_settings, checked

from .addresses import parse_address
from .batches import BatchesConfig
from .debug import DebugConfig, writable_folder
from .flags import SettingsError, configured, matching, readable
from .http import HttpConfig
from .logs import DEFAULT_BUFFER_BYTES, LEAST_BUFFER_BYTES, log_levels
from .security import SecurityConfig
from .shared_images import SharedImagesConfig
from .sources import name_of
from .telemetry import TELEMETRY, TelemetryConfig, telemetry_config
from .workers import WorkersConfig

COMPRESSIONS = ("off", "low", "medium", "high")
"""gRPC's compression levels. Given a level, gRPC chooses an algorithm that the caller accepts. Given an algorithm, gRPC
would use it for every caller."""

MIB = 1024 * 1024
_PLUGIN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
_DRAIN_DELAY_S = 5.0
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container."""
_LARGEST_MESSAGE = 2**31 - 1
"""gRPC counts a message's bytes in 32 bits."""

SERVER = SettingGroup("server", "server")
LOG = SettingGroup("log", "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's own settings. Raises ConfigError, which names field, value and limit."""

    listen: tuple[str, ...] = SERVER.setting(
        (DEFAULT_ADDRESS,),
        "address to listen on: HOST:PORT, [IPV6]:PORT or unix:PATH",
        parse=parse_address,
        metavar="ADDRESS",
        shown=DEFAULT_ADDRESS,
    )
    """The default is loopback. Other addresses need TLS and credentials in ``security``."""
    shared_listen: tuple[str, ...] = ()
    """TCP addresses that several workers share, each with its own socket (SO_REUSEPORT). A worker listens on them only
    while it answers requests. This is not a setting: the supervisor passes the addresses to its workers."""
    front_listen: str | None = None
    """The unix socket on which the front of several workers reaches this one. This is not a setting: the supervisor
    chooses it."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    max_message_bytes: int = SERVER.setting(
        33 * MIB, "largest message that the server receives or sends", low=1, high=_LARGEST_MESSAGE
    )
    """The default holds the largest image (32 MiB) or the raw pixels of 11 megapixels, and 1 MiB of other fields."""
    compression: Literal["off", "low", "medium", "high"] = SERVER.setting(
        "off",
        "compress responses to callers that accept compression; useful on slow networks, costs CPU time",
        choices=COMPRESSIONS,
    )
    image_store_bytes: int = SERVER.setting(
        256 * MIB,
        "bytes of images to store for requests that name an image by its id; the least recently used are dropped "
        "first; 0 stores none",
        low=0,
    )
    upload_idle_s: float = checked(10.0, low=0.1)
    """Cancel an upload that receives no data for this long, because it holds memory."""
    model_folders: tuple[str, ...] = SERVER.setting(
        (),
        "folder, or s3://BUCKET/PREFIX, from which administrators may load models by path while the server runs",
        parse=matching(".+", "a folder"),
        metavar="DIR",
        shown="none: known names, hub ids, and the models that were given at the start",
    )
    skills: tuple[str, ...] = SERVER.setting(
        (),
        "skill to serve in addition to the model's own (RunSkill)",
        flag="--skill",
        parse=matching(_PLUGIN, "PACKAGE.MODULE:CLASS"),
        metavar="MODULE:CLASS",
        shown="none",
    )
    grace_s: float = SERVER.setting(
        30.0,
        "how long running requests may continue after SIGTERM or Ctrl-C; a second signal ends them",
    )
    """The default is the same as Kubernetes' terminationGracePeriodSeconds."""
    drain_delay_s: float | None = SERVER.setting(
        None,
        "how long the server still accepts requests after SIGTERM, before --grace, while health checks report "
        "NOT_SERVING, so that load balancers can react",
        shown="5, or --grace if that is less; 0 in Kubernetes",
    )
    orca: bool = TELEMETRY.setting(
        False, "send ORCA load reports to load balancers, in trailers and in a stream of their own"
    )
    access_log: Literal["off", "text", "json"] = LOG.setting(
        "off",
        "log one line per call, as text (the default if the flag has no value) or json",
        choices=("off", "text", "json"),
        bare="text",
    )
    audit_log: str | None = LOG.setting(
        None,
        "file for one record of each administrative call, as a line of JSON, whatever --log-level; - is standard "
        "output. Such calls are refused while it can't be written",
        metavar="FILE",
        shown="none",
    )
    usage_log: str | None = LOG.setting(
        None,
        "folder for what each principal used of each model and adapter, as lines of JSON in a file an hour",
        metavar="FOLDER",
        parse=writable_folder,
        shown="none",
    )
    usage_log_bytes: int = checked(1024 * MIB, low=MIB)
    """Limit on the bytes of all files in that folder. The oldest ones are deleted."""
    log_format: Literal["text", "json"] = LOG.setting(
        "text",
        "format of all log records; json writes one object per line",
        choices=("text", "json"),
    )
    log_level: str = LOG.setting(
        "info",
        "least severe level to log on standard error: debug, info, warning or error; levels of single modules may "
        "follow, as in info,kestrel_engine.steps.loop=debug",
        parse=readable(log_levels),
        metavar="LEVELS",
    )
    log_buffer_bytes: int = LOG.setting(
        DEFAULT_BUFFER_BYTES,
        "limit on the bytes of log lines that wait to be written; the server drops and counts further lines",
        low=LEAST_BUFFER_BYTES,
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    shared_images: SharedImagesConfig = field(default_factory=SharedImagesConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        batches = self.batches.path
        if batches is not None and self.workers.count != 1:
            raise ConfigError("batches", batches, "needs one server process")
        if self.shared_images.url is not None and self.image_store_bytes == 0:
            raise ConfigError(
                "image_store_bytes",
                0,
                "must be above 0 with --shared-images, whose images it holds",
            )

    @property
    def leaving_s(self) -> float:
        """``drain_delay_s``, or its default: long enough for a load balancer that checks health every 2 s to react.

        In Kubernetes the default is 0, because a preStop hook waits before the signal (deploy/kubernetes).
        """
        if self.drain_delay_s is not None:
            return self.drain_delay_s
        return 0.0 if os.environ.get(_IN_KUBERNETES) else min(_DRAIN_DELAY_S, self.grace_s)


PARTS: dict[str, type[Any]] = {
    "workers": WorkersConfig,
    "debug": DebugConfig,
    "http": HttpConfig,
    "shared_images": SharedImagesConfig,
    "batches": BatchesConfig,
}
"""The fields of ServerConfig whose flags need nothing else."""


def server_config(args: argparse.Namespace, security: SecurityConfig | None = None) -> ServerConfig:
    """``security``: None stands for the defaults of SecurityConfig. Raises SettingsError."""
    parts = {name: configured(part, args) for name, part in PARTS.items()}
    if parts["workers"].devices and getattr(args, "device", "auto") != "auto":
        raise SettingsError(
            f"{name_of(args, '--devices')} and {name_of(args, '--device')}: give only one of the two"
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
        **parts,
    )
