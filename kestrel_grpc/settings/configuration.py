"""The server's whole configuration: all flags, the configuration file, and the output of --print-config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kestrel_client.commands.parser import suggestion
from kestrel_engine import RuntimeConfig

from .cluster import ClusterConfig
from .flags import Parser, add_settings
from .model import add_model_flags, runtime_configs
from .security import add_security_flags, security_config
from .server import PARTS, ServerConfig, server_config
from .shared_images import PASSWORD_VARIABLE
from .sources import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    FlagSetting,
    SettingsError,
    read_config_file,
    variable_of,
)
from .telemetry import TelemetryConfig

_HIDDEN = "(hidden)"
SECRETS = ("KESTREL_API_KEY", "MOONDREAM_API_KEY", PASSWORD_VARIABLE)
"""Variables that have neither a flag nor a key."""
_OF_CLIENTS = tuple(
    f"KESTREL_{name}"
    for name in "TOKEN SERVER TIMEOUT TLS CA CLIENT_CERT CLIENT_KEY SERVER_NAME".split()
)
"""Variables of the commands that call a server."""
_OF_A_CLUSTER = re.compile(r"KESTREL_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")
"""Kubernetes sets these for a Service whose name begins with kestrel."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of ``serve``."""

    server: ServerConfig
    runtimes: tuple[RuntimeConfig, ...]
    """Of the models, the default first."""

    @property
    def runtime(self) -> RuntimeConfig:
        return self.runtimes[0]


def add_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None) -> None:
    """Adds every flag of the server, and ``--config``."""
    add_config_flag(parser)
    add_model_flags(parser, environ, several=True)
    add_server_flags(parser, environ)
    add_security_flags(parser, environ)


def add_server_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    """Adds the flags of ServerConfig and of the configurations in it, except the security flags."""
    add_settings(parser, ServerConfig, TelemetryConfig, *PARTS.values(), environ=environ)


def configuration(args: argparse.Namespace) -> Configuration:
    """Raises SettingsError."""
    return Configuration(server_config(args, security_config(args)), runtime_configs(args))


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config``: the file gives the settings that neither a flag nor a variable gives."""
    assert isinstance(parser, Parser)
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help=f"TOML file of settings; flags and variables override it [none; {CONFIG_VARIABLE}]",
    )
    read_config_file(parser, known_settings)


def known_settings() -> Sequence[FlagSetting]:
    """All settings that a file may hold, because one file serves all commands."""
    parser = Parser(add_help=False)
    add_flags(parser, {})
    add_settings(parser, ClusterConfig, environ={})
    return parser.sources.settings


def without_effect(settings: Sequence[FlagSetting], environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like one of ``settings`` and is none of them."""
    known = {
        CONFIG_VARIABLE,
        *SECRETS,
        *_OF_CLIENTS,
        *(variable_of(each.flag) for each in settings),
    }
    return [
        f"{name} has no effect: it names no setting{suggestion(name, known)}"
        for name in sorted(environ)
        if name.startswith("KESTREL_") and name not in known and not _OF_A_CLUSTER.fullmatch(name)
    ]


def refuse_removed(removed: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raises SettingsError if a variable of a removed flag is set, because a server without it may be less safe."""
    for flag, instead in removed.items():
        if (name := variable_of(flag)) in environ:
            raise SettingsError(f"{name}: there is no such setting any more{instead}")


def print_configuration(
    settings: Sequence[FlagSetting], args: argparse.Namespace, environ: Mapping[str, str]
) -> str:
    """TOML that gives the same configuration, with the source of each value in a comment.

    Settings that the device or the model decides, and variables that a file cannot set, are printed as comments.
    Secrets are hidden.
    """

    def line(setting: FlagSetting) -> str:
        value, source = getattr(args, setting.dest), args.sources[setting.dest]
        origin = "default" if source.kind == "default" else f"{source.kind} {source.name}"
        shown = f"# {setting.key}: {setting.shown}" if value is None else _line(setting, value)
        return f"{shown}  # {origin}"

    used = args.config or "no file"
    parts = [f"# kestrel-grpc: flags, then variables, then {used}, then defaults\n"]
    parts += _sections(settings, line)
    if variables := _variables(environ):
        parts.append("\n".join(["# Variables that no file can set:", *variables]))
    return "\n".join(parts).rstrip("\n")


def given_settings(settings: Sequence[FlagSetting], args: argparse.Namespace) -> str:
    """TOML of those ``settings`` that are not defaults. It gives the same configuration on another machine."""
    chosen = [
        each
        for each in settings
        if getattr(args, each.dest) is not None and args.sources[each.dest].kind != "default"
    ]
    return "".join(_sections(chosen, lambda each: _line(each, getattr(args, each.dest))))


def _sections(settings: Sequence[FlagSetting], line: Callable[[FlagSetting], str]) -> list[str]:
    """The tables of a file, with a ``line`` for each of ``settings``."""
    tables: dict[str, str] = {}
    for each in settings:
        if each.section is not None:
            begun = tables.get(each.section, f"[{each.section}]\n")
            tables[each.section] = f"{begun}{line(each)}\n"
    return list(tables.values())


def _line(setting: FlagSetting, value: Any) -> str:
    if setting.repeated and setting.default is not None and len(value) == 1:
        (value,) = value  # One model needs no list.
    return f"{setting.key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    # A JSON string is a TOML string, except for one control character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _variables(environ: Mapping[str, str]) -> list[str]:
    lines = []
    lines += [f"# {name} = {_HIDDEN}" for name in SECRETS if environ.get(name)]
    for name in sorted(environ):
        if name.startswith("OTEL_") and environ[name]:
            secret = "HEADERS" in name
            shown = _HIDDEN if secret else _toml(_USER_INFO.sub(f"{_HIDDEN}@", environ[name]))
            lines.append(f"# {name} = {shown}")
    return lines
