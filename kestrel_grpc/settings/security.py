"""SecurityConfig: TLS, credentials and limits of callers, and their flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field

from kestrel_engine import ConfigError, SettingGroup, check_settings, checked

from .budgets import token_budget
from .flags import (
    ON_OFF,
    SettingsError,
    add_settings,
    configured,
    dest_of,
    on_or_off,
    readable,
)
from .sources import name_of

KIB = 1024
_EXTRA_GRACE_S = 10.0
GIB = 1024 * 1024 * 1024
_MOST = 1_000_000

SECURITY = SettingGroup("TLS and callers", "security")
CALLS = SettingGroup("limits of calls (0: none) and connections", "calls")


OPEN_SERVICES = ("health", "reflection", "metrics")
_NO_SERVICE = "none"


def _open_service(text: str) -> str:
    if text not in (*OPEN_SERVICES, _NO_SERVICE):
        raise ValueError(f"must be {', '.join(OPEN_SERVICES)} or {_NO_SERVICE}")
    return text


def _on_off_or_file(text: str) -> str:
    try:
        return on_or_off(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. The server reads all of them again when one changes."""

    certificate: str = SECURITY.setting(
        MISSING,
        "the server's certificate chain (PEM); the server reads the file again when it changes",
        flag="--tls-cert",
        metavar="FILE",
        shown="no TLS",
    )
    """The server's own certificate comes first."""
    private_key: str = SECURITY.setting(
        MISSING,
        "the private key of --tls-cert (PEM, unencrypted)",
        flag="--tls-key",
        metavar="FILE",
        shown="none",
    )
    client_ca: str | None = SECURITY.setting(
        None,
        "clients must present a certificate of one of these authorities (PEM)",
        flag="--tls-client-ca",
        metavar="FILE",
        shown="clients need no certificate",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one principal, and of all principals together. None means no limit. Raises ConfigError."""

    calls: int | None = CALLS.setting(
        1024,
        "limit on a caller's calls in progress; with --workers, each worker counts alone",
        flag="--max-calls",
        low=0,
        high=_MOST,
    )
    held_bytes: int | None = CALLS.setting(
        GIB,
        "limit on the bytes of all callers' request messages in memory; a message counts twice, and its bytes are "
        "reserved before it is read",
        flag="--max-held-bytes",
    )
    rate: float | None = CALLS.setting(
        None,
        "limit on a caller's calls per second, averaged over time; with --workers, each worker counts alone",
        metavar="PER_SECOND",
        low=0,
        high=_MOST,
        zero_is_none=True,
        shown="0",
    )
    burst: int = checked(10, low=1, high=_MOST)
    """How many calls a caller may make at once after a pause, if ``rate`` is set."""
    token_budget: str = CALLS.setting(
        "",
        "budget of a principal in weighted tokens, such as minute=60000,day=2000000; then what a token counts (1 by "
        "default): prompt=W, image=W, cached=W, output=W; 'shadow' refuses nothing, but counts and logs; file=PATH "
        "stores what was used, so that a restart gives nothing back",
        parse=readable(token_budget),
        metavar="LIMITS",
        shown="no limits but those in the file of tokens",
    )
    deadline_s: float | None = CALLS.setting(
        120.0,
        "limit on the duration of a call; a shorter deadline of the caller takes precedence",
        flag="--max-deadline",
    )
    read_s: float | None = checked(30.0)
    """Limit on the time in which a request message must arrive."""
    write_s: float | None = CALLS.setting(
        60.0, "how long a stream waits for a client that does not read", flag="--write-timeout"
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of the number of connections. None means no limit. Raises ConfigError."""

    connections: int | None = CALLS.setting(
        1000,
        "limit on connections to the addresses of --listen, and the same limit again for --http-listen; the server "
        "closes further connections at once",
        flag="--max-connections",
        low=0,
        high=_MOST,
    )
    address_connections: int | None = CALLS.setting(
        None,
        "limit on connections of one address (IPv6: one /64 network); the server closes the newest ones; Linux only",
        flag="--max-connections-per-address",
        low=0,
        high=_MOST,
        shown="half of --max-connections",
    )
    """0: no limit. ``most_of_address`` is what counts."""
    metadata_bytes: int = checked(16 * KIB, low=1024, high=1024 * 1024)
    """Limit on the metadata of a call."""
    streams: int = checked(100, low=1, high=_MOST)
    """Limit on calls in progress on one connection."""
    age_s: float | None = CALLS.setting(
        1800.0,
        "age at which the server asks a client to connect again, varied by a tenth (0: never)",
        flag="--max-connection-age",
    )
    age_grace_s: float | None = checked(None)
    """How long the calls of a connection may continue after --max-connection-age."""
    keepalive_s: float | None = checked(60.0)
    """Interval without data after which the server sends a ping to a client; None: never."""
    keepalive_timeout_s: float = checked(20.0, above=0)
    """How long the server waits for the answer to a ping before it closes the connection."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def most_of_address(self) -> int | None:
        """Connections that one address may have; None without a limit."""
        if self.address_connections is not None:
            return self.address_connections or None
        return None if self.connections is None else (self.connections + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """By default callers need no credentials, and the server listens on loopback addresses and unix sockets only."""

    tls: TlsFiles | None = None
    """For all TCP addresses. File permissions protect unix sockets."""
    auth_tokens: str | None = SECURITY.setting(
        None,
        "file of tokens and their principals, made by 'kestrel-grpc token'; the server reads it again when it changes",
        metavar="FILE",
        shown="callers need no token; KESTREL_API_KEY alone sets one token with all scopes",
    )
    api_key: str | None = field(default=None, repr=False)
    """A token with all scopes, independent of ``auth_tokens``."""
    open_services: tuple[str, ...] = SECURITY.setting(
        ("health", "reflection"),
        "what callers may use without credentials if others need them: health, reflection, metrics (a scraper then "
        "needs no token); none: nothing",
        flag="--open",
        parse=_open_service,
        metavar="SERVICE",
        shown="health,reflection",
    )
    metrics_tls: str = SECURITY.setting(
        "on",
        "on: --metrics-listen has the certificate of --tls-cert, if that is set; off: no TLS; FILE: with TLS, scrapers "
        "must present a certificate of one of these authorities (PEM)",
        parse=_on_off_or_file,
        metavar="on|off|FILE",
    )
    insecure_listen: bool = SECURITY.setting(
        False, "allow addresses beyond loopback without TLS or without credentials"
    )
    calls: CallLimits = field(default_factory=CallLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        check_settings(self)
        if len(self.open_services) > 1 and _NO_SERVICE in self.open_services:
            value, limit = ",".join(self.open_services), f"{_NO_SERVICE} must be the only value"
            raise ConfigError("open_services", value, limit)

    @property
    def age_grace_s(self) -> float | None:
        """Seconds that the calls of a connection may continue after its maximum age; None means no limit."""
        if self.connections.age_grace_s is not None:
            return self.connections.age_grace_s
        return None if self.calls.deadline_s is None else self.calls.deadline_s + _EXTRA_GRACE_S

    def is_open(self, service: str) -> bool:
        """Whether callers without credentials may use ``service``: health, reflection or metrics."""
        return service in self.open_services

    @property
    def metrics_client_ca(self) -> str | None:
        """File of the authorities of scrapers' certificates; None if scrapers need none."""
        return None if self.metrics_tls in ON_OFF else self.metrics_tls

    @property
    def has_tokens(self) -> bool:
        return self.auth_tokens is not None or self.api_key is not None

    @property
    def client_ca(self) -> str | None:
        """File of the authorities of callers' certificates; None if callers need none."""
        return None if self.tls is None else self.tls.client_ca

    @property
    def knows_callers(self) -> bool:
        """Whether callers need credentials."""
        return self.has_tokens or self.client_ca is not None


def add_security_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    add_settings(parser, TlsFiles, SecurityConfig, CallLimits, ConnectionLimits, environ=environ)
    # A secret has no flag, because every user of the machine can read the flags of its processes.
    key = (os.environ if environ is None else environ).get("KESTREL_API_KEY") or None
    parser.set_defaults(api_key=key)


def security_config(args: argparse.Namespace) -> SecurityConfig:
    """Raises SettingsError."""
    return configured(
        SecurityConfig,
        args,
        tls=_tls(args),
        api_key=args.api_key,
        calls=configured(CallLimits, args),
        connections=configured(ConnectionLimits, args),
    )


_TLS_FLAGS = ("--tls-cert", "--tls-key", "--tls-client-ca", "--metrics-tls")


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    asks_scrapers = args.metrics_tls not in ON_OFF
    flags = [flag for flag in _TLS_FLAGS[:3] if getattr(args, dest_of(flag))]
    flags += _TLS_FLAGS[3:] if asks_scrapers else ()
    if not flags:
        return None
    for flag in _TLS_FLAGS[:2]:
        if flag not in flags:
            named = " and ".join(name_of(args, other) for other in flags)
            if asks_scrapers:  # Perhaps a misspelt word.
                named += f" ({args.metrics_tls!r} is neither on nor off, so it names a file)"
            raise SettingsError(
                f"{named}: TLS needs both --tls-cert and --tls-key; {flag} is not given"
            )
    return configured(TlsFiles, args)
