"""Flags, and with ``sources`` the only reader of variables and of the configuration file. From them comes a frozen
ServerConfig; ``model_settings`` makes the engine's RuntimeConfig.

Every flag ``--some-thing`` added through Flags has a variable KESTREL_SOME_THING and, in a section, a key
``some-thing`` of the file: the flag wins over the variable, the variable over the file, the file over the default. What
is invalid is said in one line that names where it comes from.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from .addresses import parse_address
from .debug import DebugConfig, add_debug_flags, debug_config
from .logs import DEFAULT_BUFFER_BYTES, add_log_flags
from .security import SecurityConfig
from .sources import UNSET, Setting, Sources, name_of, variable_of
from .sources import SettingsError as SettingsError
from .telemetry import TelemetryConfig, telemetry_config
from .worker_flags import add_worker_flags, workers_config
from .workers import WorkersConfig

PROGRAM = "kestrel-grpc"
DEFAULT_ADDRESS = "127.0.0.1:50051"
EXIT_USAGE = 2

COMPRESSIONS = ("off", "low", "medium", "high")
"""gRPC's levels: which algorithm one takes depends on the caller's. An algorithm would go to all, asked or not."""

MIB = 1024 * 1024
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(i?)B?|B)?", re.IGNORECASE)
_PLUGIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_LARGEST_MESSAGE = 2**31 - 1
"""grpc counts a message's bytes in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server itself needs to know; the engine's part is RuntimeConfig."""

    listen: tuple[str, ...] = (DEFAULT_ADDRESS,)
    """Addresses, TCP and unix. Loopback by default: beyond it, ``security`` must be set up."""
    shared_listen: tuple[str, ...] = ()
    """TCP addresses that other processes listen on too, each on its own socket (SO_REUSEPORT); only while requests are
    answered. Not a setting: a supervisor gives them to its workers."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    max_message_bytes: int = 64 * MIB
    """Of one message, either way: the largest picture allowed (32 MiB) and raw pixels of a 20 megapixel one."""
    compression: Literal["off", "low", "medium", "high"] = "off"
    """Of what is sent to callers who take it; what they send may be compressed in any case."""
    image_store_bytes: int = 256 * MIB
    """Pictures kept for requests that name them by id; 0 keeps none."""
    skills: tuple[str, ...] = ()
    """Plug-in skills to serve besides the five, as ``package.module:SkillClass``."""
    grace_s: float = 30.0
    """How long running requests may go on once the server is told to stop. Kubernetes' own default."""
    drain_delay_s: float = 0.0
    """How long requests are still taken before, while health says NOT_SERVING: until whoever asks it has noticed."""
    access_log: Literal["off", "text", "json"] = "off"
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    """As log_settings.log_levels reads it."""
    log_buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Lines of the log that may wait to be written."""
    orca: bool = False
    """Whether the trailers of VisionService's calls say how busy the server is."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """What is measured, and where that goes. By default nothing."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """How many processes serve. By default this one."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Where profiles and captured requests may be written. By default nowhere."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with EXIT_USAGE. Settles what Flags added, once flags are parsed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sources = Sources()

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, which calls it for a command's parser too. Raises SettingsError."""
        parsed, rest = super().parse_known_args(args, namespace)
        if self.sources.settings:
            self.sources.settle(parsed)
        return cast(argparse.Namespace, parsed), rest


class _Collect(argparse.Action):
    """Gathers the lists that a repeated flag gives; the first of them replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        kept = [] if before is self.default else before
        setattr(namespace, self.dest, [*kept, *values])


class Flags:
    """A group of flags whose defaults come from variables and, if it has a ``section``, from the configuration file."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        title: str,
        *,
        section: str | None = None,
        environ: Mapping[str, str] | None = None,
        description: str | None = None,
    ) -> None:
        """``parser`` is a Parser: the type is argparse's for those who know no other."""
        assert isinstance(parser, Parser), "only a Parser settles what isn't given"
        if section is not None and description is None:
            description = f"in a configuration file: [{section}]"
        self._group = parser.add_argument_group(title, description)
        self._settings = parser.sources.settings
        self._section = section
        self._environ = os.environ if environ is None else environ
        parser.sources.environ = self._environ

    def add(
        self,
        flag: str,
        *aliases: str,
        help: str,
        default: Any = None,
        type: Callable[[str], Any] = str,
        shown: str | None = None,
        **options: Any,
    ) -> None:
        """``aliases``: other names of the flag, its variable and key. ``shown``: the default as the help shows it, if
        not by itself."""
        shown = shown if shown is not None else f"{default}"
        action = self._group.add_argument(
            flag,
            *aliases,
            default=UNSET,
            type=_told(type),
            help=f"{help} [{shown}; {variable_of(flag)}]",
            **options,
        )
        setting = Setting(
            flags=(flag, *aliases),
            dest=action.dest,
            section=self._section,
            parse=type,
            default=default,
            shown=shown,
            environ=self._environ,
            choices=options.get("choices"),
            repeated=options.get("action") is _Collect,
        )
        self._settings.append(setting)

    def switch(self, flag: str, *, help: str) -> None:
        """A flag without a value; its variable takes on or off, its key true or false."""
        action = self._group.add_argument(
            flag, action="store_true", default=UNSET, help=f"{help} [off; {variable_of(flag)}]"
        )
        setting = Setting(
            flags=(flag,),
            dest=action.dest,
            section=self._section,
            parse=str,
            default=False,
            shown="off",
            environ=self._environ,
            switch=True,
        )
        self._settings.append(setting)


def add_server_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    flags = Flags(parser, "server", section="server", environ=environ)
    flags.add(
        "--listen",
        type=_addresses,
        action=_Collect,
        metavar="ADDRESS",
        shown=DEFAULT_ADDRESS,
        help="where to listen: HOST:PORT, [IPV6]:PORT or unix:PATH; may be given several times, or several with commas",
    )
    flags.add(
        "--max-message-bytes",
        type=size,
        metavar="SIZE",
        default=default_of(ServerConfig, "max_message_bytes"),
        shown="64MiB",
        help="largest message, either way",
    )
    flags.add(
        "--compression",
        choices=COMPRESSIONS,
        default=default_of(ServerConfig, "compression"),
        help="compress answers for callers who take it: for slow networks, it costs CPU",
    )
    flags.add(
        "--image-store-bytes",
        type=size,
        metavar="SIZE",
        default=default_of(ServerConfig, "image_store_bytes"),
        shown="256MiB",
        help="pictures kept for requests that name them by id, unused ones dropped first; 0 keeps none",
    )
    flags.add(
        "--skill",
        type=_plugins,
        action=_Collect,
        metavar="MODULE:CLASS",
        shown="none",
        help="a skill to serve besides the model's own (RunSkill); may be given several times, or several with commas",
    )
    flags.add(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        default=default_of(ServerConfig, "grace_s"),
        help="how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends them",
    )
    flags.add(
        "--drain-delay",
        type=seconds,
        metavar="SECONDS",
        default=default_of(ServerConfig, "drain_delay_s"),
        help="how long new requests are still taken after SIGTERM or Ctrl-C, before --grace, while health says no",
    )
    add_worker_flags(Flags(parser, "workers", section="server", environ=environ), whole)
    telemetry = Flags(parser, "telemetry", section="telemetry", environ=environ)
    telemetry.add(
        "--metrics-listen",
        type=parse_address,
        metavar="ADDRESS",
        shown="off",
        help="where Prometheus finds metrics: HOST:PORT; needs kestrel-grpc[telemetry]",
    )
    telemetry.add(
        "--orca",
        choices=("on", "off"),
        default="off",
        help="load reports in trailers, for balancers",
    )
    add_log_flags(Flags(parser, "log", section="log", environ=environ), size)
    add_debug_flags(
        Flags(parser, "profiles and captures", section="debug", environ=environ), size, whole
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Raises SettingsError."""
    listen = tuple(dict.fromkeys(args.listen or ()))
    if not 1 <= args.max_message_bytes <= _LARGEST_MESSAGE:
        name = name_of(args, "--max-message-bytes")
        raise SettingsError(f"{name}={args.max_message_bytes}: must be 1 to {_LARGEST_MESSAGE}")
    try:
        telemetry = telemetry_config(os.environ, args.metrics_listen)
    except ValueError as error:
        flag = "--metrics-listen"
        raise SettingsError(str(error).replace(flag, name_of(args, flag), 1)) from None
    return ServerConfig(
        listen=listen or (DEFAULT_ADDRESS,),
        max_message_bytes=args.max_message_bytes,
        compression=args.compression,
        image_store_bytes=args.image_store_bytes,
        skills=tuple(dict.fromkeys(args.skill or ())),
        grace_s=args.grace,
        drain_delay_s=args.drain_delay,
        access_log=args.access_log,
        log_format=args.log_format,
        log_level=args.log_level,
        log_buffer_bytes=args.log_buffer_bytes,
        orca=args.orca == "on",
        telemetry=telemetry,
        workers=workers_config(args),
        debug=debug_config(args),
    )


def size(text: str) -> int:
    """Bytes: a number, or one with K, M, G (thousands) or KiB, MiB, GiB (1024s). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a number of bytes, like 1000000, 64MiB or 2G")
    power: int = " KMG".index(match[2].upper()) if match[2] else 0
    unit: int = (1024 if match[3] else 1000) ** power
    return int(match[1]) * unit


def whole(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def seconds(text: str) -> float:
    """A time of at most a day. Raises ValueError."""
    value = float(text) if re.fullmatch(r"\d+(\.\d*)?", text.strip()) else -1.0
    if not 0 <= value <= 86_400:
        raise ValueError("must be a number of seconds from 0 to 86400")
    return value


def gib(text: str) -> float:
    """A number of GiB, whole or not. Raises ValueError."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text.strip()):
        raise ValueError("must be a number of GiB")
    return float(text)


def _addresses(text: str) -> list[str]:
    return [parse_address(part.strip()) for part in text.split(",")]


def _plugins(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(_PLUGIN.fullmatch(name) for name in names):
        raise ValueError("must be PACKAGE.MODULE:CLASS")
    return names


def _told(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse hides a ValueError's words, not an ArgumentTypeError's."""

    def parse(text: str) -> Any:
        try:
            return type(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def default_of(config: Any, field: str) -> Any:
    """What a field of a configuration class is if nobody says."""
    return config.__dataclass_fields__[field].default
