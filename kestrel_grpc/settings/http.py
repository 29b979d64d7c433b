"""HttpConfig: the HTTP addresses of the server and their limits. The default is no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, checked

from .addresses import parse_address
from .flags import matching

HTTP = SettingGroup("HTTP", "http")
_host = matching(
    r"(?=[^:]{1,253}(:|$))([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z][a-z0-9-]{0,62}(:[1-9]\d{0,4})?",
    "HOST or HOST:PORT, with a full name such as images.example.org",
)
"""A name with a dot, whose last part is no number, so that no form of an IP address is a host."""
_origin = matching(
    r"\*|https?://([a-z0-9._-]{1,253}|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?",
    "SCHEME://HOST or SCHEME://HOST:PORT, as in https://app.example.org, or * for all origins",
)
_name = matching(
    r"\*|[a-z0-9._-]{1,253}", "a name without a port, as in kestrel.example.org, or * for all"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Raises ConfigError."""

    http_listen: tuple[str, ...] = HTTP.setting(
        (),
        "address to listen on for HTTP: HOST:PORT, [IPV6]:PORT or unix:PATH; needs the extra http",
        parse=parse_address,
        metavar="ADDRESS",
        shown="no HTTP",
    )
    http_idle_s: float = checked(75.0, low=1)
    """Close an HTTP connection that sends no request for this long."""
    http_fetch_allow: tuple[str, ...] = HTTP.setting(
        (),
        "host from which the server fetches images that requests name by address: HOST or HOST:PORT; hosts with "
        "private IP addresses are refused",
        parse=lambda text: _host(text.lower()),
        metavar="HOST",
        shown="none: images come in requests",
    )
    http_allow_origins: tuple[str, ...] = HTTP.setting(
        (),
        "origin of web pages whose programs may use the HTTP port, as in https://app.example.org; * for all",
        parse=lambda text: _origin(text.lower()),
        metavar="ORIGIN",
        shown="none: only the server's own page",
    )
    http_hosts: tuple[str, ...] = HTTP.setting(
        (),
        "name by which clients reach the HTTP port, as in kestrel.example.org, in addition to its own addresses; * for "
        "all",
        parse=lambda text: _name(text.lower()),
        metavar="NAME",
        shown="names of this machine; beyond loopback with TLS or credentials: every name",
    )
    is_shared: bool = False
    """Whether other processes listen on the same TCP addresses, each on its own socket (SO_REUSEPORT). Not a setting: a
    supervisor sets it for its workers."""

    def __post_init__(self) -> None:
        check_settings(self)
