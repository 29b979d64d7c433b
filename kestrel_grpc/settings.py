"""Flags and environment: the only reader of either. From them comes a frozen ServerConfig; ``model_settings`` makes the
engine's RuntimeConfig.

Every flag ``--some-thing`` added through Flags has an environment variable KESTREL_SOME_THING: the flag wins over the
variable, the variable over the default. What is invalid is said in one line that names the flag or the variable.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from .addresses import parse_address
from .log_settings import add_log_flags
from .security.config import SecurityConfig
from .telemetry.config import TelemetryConfig, telemetry_config

PROGRAM = "kestrel-grpc"
DEFAULT_ADDRESS = "127.0.0.1:50051"
EXIT_USAGE = 2

MIB = 1024 * 1024
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(i?)B?|B)?", re.IGNORECASE)
_PLUGIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
_LARGEST_MESSAGE = 2**31 - 1
"""grpc counts a message's bytes in 32 bits."""


class SettingsError(Exception):
    """A flag or variable is invalid; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server itself needs to know; the engine's part is RuntimeConfig."""

    listen: tuple[str, ...] = (DEFAULT_ADDRESS,)
    """Addresses, TCP and unix. Loopback by default: beyond it, ``security`` must be set up."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    max_message_bytes: int = 64 * MIB
    """Of one message, either way: the largest picture allowed (32 MiB) and raw pixels of a 20 megapixel one."""
    image_store_bytes: int = 256 * MIB
    """Pictures kept for requests that name them by id; 0 keeps none."""
    skills: tuple[str, ...] = ()
    """Plug-in skills to serve besides the five, as ``package.module:SkillClass``."""
    grace_s: float = 30.0
    """How long running requests may go on once the server is told to stop. Kubernetes' own default."""
    access_log: Literal["off", "text", "json"] = "off"
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    """As log_settings.log_levels reads it."""
    orca: bool = False
    """Whether the trailers of VisionService's calls say how busy the server is."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """What is measured, and where that goes. By default nothing."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with EXIT_USAGE."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Collect(argparse.Action):
    """Gathers the lists that a repeated flag gives; the first of them replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        kept = [] if before is self.default else before
        setattr(namespace, self.dest, [*kept, *values])


class Flags:
    """Adds flags whose defaults come from the environment."""

    def __init__(
        self, parser: argparse._ActionsContainer, environ: Mapping[str, str] | None = None
    ) -> None:
        self._parser = parser
        self._environ = os.environ if environ is None else environ

    def add(
        self,
        flag: str,
        *,
        help: str,
        default: Any = None,
        type: Callable[[str], Any] = str,
        shown: str | None = None,
        **options: Any,
    ) -> None:
        """``shown``: the default as the help shows it, if not by itself. Raises SettingsError for a bad variable."""
        variable = "KESTREL_" + flag.removeprefix("--").upper().replace("-", "_")
        value = self._environ.get(variable)
        if value is not None and value != "":
            try:
                parsed = type(value)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise SettingsError(f"{variable}={value!r}: {error}") from None
            choices = options.get("choices")
            if choices is not None and parsed not in choices:
                raise SettingsError(f"{variable}={value!r}: must be one of {', '.join(choices)}")
        shown = shown if shown is not None else f"{default}"
        self._parser.add_argument(
            flag,
            default=default if not value else parsed,
            type=_told(type),
            help=f"{help} [{shown}; {variable}]",
            **options,
        )

    def switch(self, flag: str, *, help: str) -> None:
        """A flag without a value; its variable takes on or off."""
        variable = "KESTREL_" + flag.removeprefix("--").upper().replace("-", "_")
        value = self._environ.get(variable, "").strip().lower()
        if value not in ("", *_ON, *_OFF):
            raise SettingsError(f"{variable}={value!r}: must be on or off")
        self._parser.add_argument(
            flag, action="store_true", default=value in _ON, help=f"{help} [off; {variable}]"
        )


def add_server_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    flags = Flags(parser.add_argument_group("server"), environ)
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
        "--metrics-listen",
        type=parse_address,
        metavar="ADDRESS",
        shown="off",
        help="where Prometheus finds metrics: HOST:PORT; needs kestrel-grpc[telemetry]",
    )
    flags.add(
        "--orca",
        choices=("on", "off"),
        default="off",
        help="load reports in trailers, for balancers",
    )
    add_log_flags(flags)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Raises SettingsError."""
    listen = tuple(dict.fromkeys(args.listen or ()))
    if not 1 <= args.max_message_bytes <= _LARGEST_MESSAGE:
        raise SettingsError(
            f"--max-message-bytes={args.max_message_bytes}: must be 1 to {_LARGEST_MESSAGE}"
        )
    try:
        telemetry = telemetry_config(os.environ, args.metrics_listen)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return ServerConfig(
        listen=listen or (DEFAULT_ADDRESS,),
        max_message_bytes=args.max_message_bytes,
        image_store_bytes=args.image_store_bytes,
        skills=tuple(dict.fromkeys(args.skill or ())),
        grace_s=args.grace,
        access_log=args.access_log,
        log_format=args.log_format,
        log_level=args.log_level,
        orca=args.orca == "on",
        telemetry=telemetry,
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
