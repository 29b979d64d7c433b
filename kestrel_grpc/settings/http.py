"""HttpConfig: the HTTP addresses of the server and their limits. The default is no HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, checked, setting

from .addresses import parse_address

HTTP = SettingGroup("HTTP", "http")
_HOST = re.compile(
    r"(?=[^:]{1,253}(:|$))([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z][a-z0-9-]{0,62}(:[1-9]\d{0,4})?"
)
"""A name with a dot, whose last part is no number, so that no form of an IP address is a host."""

_ORIGIN = re.compile(r"\*|https?://([a-z0-9._-]{1,253}|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?")


def _origins(text: str) -> list[str]:
    """Raises ValueError."""
    origins = [part.strip().lower() for part in text.split(",")]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                "must be SCHEME://HOST or SCHEME://HOST:PORT, as in https://app.example.org, or * for all origins"
            )
    return origins


_NAME = re.compile(r"\*|[a-z0-9._-]{1,253}")


def _host_names(text: str) -> list[str]:
    """Raises ValueError."""
    names = [part.strip().lower() for part in text.split(",")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                "must be a name without a port, as in kestrel.example.org, or * for all"
            )
    return names


def _addresses(text: str) -> list[str]:
    return [parse_address(part.strip()) for part in text.split(",")]


def fetched_hosts(text: str) -> list[str]:
    """Raises ValueError."""
    hosts = [part.strip().lower() for part in text.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(
                "must be HOST or HOST:PORT, with a full name such as images.example.org"
            )
    return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Raises ConfigError."""

    http_listen: tuple[str, ...] = setting(
        (),
        HTTP,
        "address to listen on for HTTP: HOST:PORT, [IPV6]:PORT or unix:PATH; repeat the flag or separate addresses "
        "with commas; needs the extra http",
        parse=_addresses,
        repeated=True,
        distinct=True,
        metavar="ADDRESS",
        shown="no HTTP",
    )
    http_idle_s: float = checked(75.0, kind="seconds", low=1)
    """Close an HTTP connection that sends no request for this long."""
    http_fetch_allow: tuple[str, ...] = setting(
        (),
        HTTP,
        "host from which the server fetches images that requests name by address: HOST or HOST:PORT; repeat the flag "
        "or separate hosts with commas; hosts with private IP addresses are refused",
        parse=fetched_hosts,
        repeated=True,
        distinct=True,
        metavar="HOST",
        shown="none: images come in requests",
    )
    http_allow_origins: tuple[str, ...] = setting(
        (),
        HTTP,
        "origin of web pages whose programs may use the HTTP port, as in https://app.example.org; * for all; repeat "
        "the flag or separate origins with commas",
        parse=_origins,
        repeated=True,
        distinct=True,
        metavar="ORIGIN",
        shown="none: only the server's own page",
    )
    http_hosts: tuple[str, ...] = setting(
        (),
        HTTP,
        "name by which clients reach the HTTP port, as in kestrel.example.org, in addition to its own addresses; * for "
        "all; repeat the flag or separate names with commas",
        parse=_host_names,
        repeated=True,
        distinct=True,
        metavar="NAME",
        shown="names of this machine; all beyond loopback with TLS or credentials",
    )
    http_metrics: bool = checked(True, kind="bool")
    """Serve the metrics of --metrics-listen at /metrics too, if the extra telemetry is installed."""
    is_shared: bool = False
    """Whether other processes listen on the same TCP addresses, each on its own socket (SO_REUSEPORT). Not a setting: a
    supervisor sets it for its workers."""

    def __post_init__(self) -> None:
        check_settings(self)
