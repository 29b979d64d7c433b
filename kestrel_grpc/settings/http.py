"""HttpConfig: the HTTP addresses of the server and their limits. The default is no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, setting

from .addresses import parse_address

HTTP = SettingGroup("HTTP", "http")


def _addresses(text: str) -> list[str]:
    return [parse_address(part.strip()) for part in text.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Raises ConfigError."""

    http_listen: tuple[str, ...] = setting(
        (),
        HTTP,
        "address to listen on for HTTP: HOST:PORT, [IPV6]:PORT or unix:PATH; repeat the flag or separate addresses "
        "with commas; needs the packages of pip install '.[http]'",
        parse=_addresses,
        repeated=True,
        distinct=True,
        metavar="ADDRESS",
        shown="no HTTP",
    )
    http_max_connections: int = setting(
        1000,
        HTTP,
        "limit on HTTP connections; the server closes further ones at once",
        kind="whole",
        metavar="N",
        low=1,
    )
    http_idle_s: float = setting(
        75.0,
        HTTP,
        "close an HTTP connection that sends no request for this long",
        kind="seconds",
        metavar="SECONDS",
        low=1,
    )
    is_shared: bool = False
    """Whether other processes listen on the same TCP addresses, each on its own socket (SO_REUSEPORT). Not a setting: a
    supervisor sets it for its workers."""

    def __post_init__(self) -> None:
        check_settings(self)
