"""SecurityConfig: what protects the server, and its flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field

from kestrel_engine import SettingGroup, check_settings, setting

from .flags import SettingsError, add_settings, configured, dest_of
from .sources import name_of

KIB = 1024
_EXTRA_GRACE_S = 10.0
GIB = 1024 * 1024 * 1024
_MOST = 1_000_000

SECURITY = SettingGroup("TLS and callers", "security")
CALLS = SettingGroup("limits of calls (0: none) and connections", "calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files, read again whenever one of them changes."""

    certificate: str = setting(
        MISSING,
        SECURITY,
        "the server's certificate chain, PEM; read again when the file changes",
        flag="--tls-cert",
        metavar="FILE",
        shown="no TLS",
    )
    """The server's own certificate comes first."""
    private_key: str = setting(
        MISSING,
        SECURITY,
        "its private key, PEM, unencrypted",
        flag="--tls-key",
        metavar="FILE",
        shown="none",
    )
    client_ca: str | None = setting(
        None,
        SECURITY,
        "clients must show a certificate of these authorities, PEM",
        flag="--tls-client-ca",
        metavar="FILE",
        shown="clients need no certificate",
    )
    client_crl: str | None = setting(
        None,
        SECURITY,
        "certificates that these authorities have revoked, PEM; read again when the file changes; needs "
        "kestrel-grpc[crl]",
        flag="--tls-client-crl",
        metavar="FILE",
        shown="none",
    )
    """Also the certificates that the scrapers' authorities have revoked (revocation.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one principal, and of all together. None: no limit. Raises ConfigError."""

    calls: int | None = setting(
        1024,
        CALLS,
        "a caller's calls in progress",
        kind="whole",
        flag="--max-calls",
        metavar="N",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    held_bytes: int | None = setting(
        GIB,
        CALLS,
        "messages of requests in memory, of all callers, each counted twice; reserved before one is read",
        kind="bytes",
        flag="--max-held-bytes",
        metavar="SIZE",
        zero_is_none=True,
    )
    rate: float | None = setting(
        None,
        CALLS,
        "a caller's calls a second, in the long run",
        kind="number",
        metavar="PER_SECOND",
        low=0,
        high=_MOST,
        zero_is_none=True,
        shown="0",
    )
    burst: int = setting(
        10,
        CALLS,
        "a caller's calls at once after a pause, where there is a rate",
        kind="whole",
        metavar="N",
        low=1,
        high=_MOST,
    )
    deadline_s: float | None = setting(
        120.0,
        CALLS,
        "how long a call may take, whatever its caller's deadline",
        kind="number",
        flag="--max-deadline",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    read_s: float | None = setting(
        30.0,
        CALLS,
        "how long a message of a request may take to arrive",
        kind="number",
        flag="--read-timeout",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    write_s: float | None = setting(
        60.0,
        CALLS,
        "how long a stream waits for a reader that does not read",
        kind="number",
        flag="--write-timeout",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of their number. None: no limit. Raises ConfigError."""

    connections: int | None = setting(
        1000,
        CALLS,
        "connections to the addresses of --listen; one beyond is closed at once",
        kind="whole",
        flag="--max-connections",
        metavar="N",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    metadata_bytes: int = setting(
        16 * KIB,
        CALLS,
        "metadata of a call",
        kind="bytes",
        flag="--max-metadata-bytes",
        metavar="SIZE",
        low=1024,
        high=1024 * 1024,
    )
    streams: int = setting(
        100,
        CALLS,
        "calls in progress on one connection",
        kind="whole",
        flag="--max-streams",
        metavar="N",
        low=1,
        high=_MOST,
    )
    age_s: float | None = setting(
        1800.0,
        CALLS,
        "after how long a client is asked to connect again, a tenth more or less (0: never)",
        kind="number",
        flag="--max-connection-age",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    age_grace_s: float | None = setting(
        None,
        CALLS,
        "how long its calls in progress may go on then",
        kind="number",
        flag="--connection-grace",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        shown="10 more than --max-deadline",
    )
    keepalive_s: float | None = setting(
        60.0,
        CALLS,
        "after how much silence a client is asked whether it is still there (0: never)",
        kind="number",
        flag="--keepalive",
        metavar="SECONDS",
        low=0,
        high=_MOST,
        zero_is_none=True,
    )
    keepalive_timeout_s: float = setting(
        20.0,
        CALLS,
        "how long it has to answer before its connection is closed",
        kind="number",
        flag="--keepalive-timeout",
        metavar="SECONDS",
        above=0,
        high=_MOST,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """By default callers need no credentials, which the server offers on loopback and unix sockets only."""

    tls: TlsFiles | None = None
    """For all TCP addresses; unix sockets are protected by their files' permissions."""
    auth_tokens: str | None = setting(
        None,
        SECURITY,
        "file of tokens and their principals, made by 'kestrel-grpc token'; read again when the file changes",
        metavar="FILE",
        shown="callers need no token; KESTREL_API_KEY alone is one token that may do everything",
    )
    api_key: str | None = field(default=None, repr=False)
    """A token of its own that may do everything."""
    open_health: bool = setting(True, SECURITY, "answer health to callers without credentials")
    open_reflection: bool = setting(
        True, SECURITY, "answer reflection to callers without credentials"
    )
    open_metrics: bool = setting(
        False,
        SECURITY,
        "answer --metrics-listen without a token of scope metrics, also where callers have tokens",
    )
    metrics_tls: bool = setting(
        True,
        SECURITY,
        "serve --metrics-listen with the certificate of --tls-cert, if there is one",
    )
    metrics_client_ca: str | None = setting(
        None,
        SECURITY,
        "scrapers must show a certificate of these authorities to --metrics-listen, PEM",
        metavar="FILE",
        shown="scrapers need no certificate",
    )
    insecure_listen: bool = setting(
        False,
        SECURITY,
        "listen beyond loopback even without TLS, or without asking for credentials",
        bare="on",
    )
    calls: CallLimits = field(default_factory=CallLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def age_grace_s(self) -> float | None:
        """Seconds that an aged connection's calls may go on; None without an end."""
        if self.connections.age_grace_s is not None:
            return self.connections.age_grace_s
        return None if self.calls.deadline_s is None else self.calls.deadline_s + _EXTRA_GRACE_S

    @property
    def has_tokens(self) -> bool:
        return self.auth_tokens is not None or self.api_key is not None

    @property
    def client_ca(self) -> str | None:
        """Authorities of callers' certificates."""
        return None if self.tls is None else self.tls.client_ca

    @property
    def knows_callers(self) -> bool:
        """Whether a caller must show who it is."""
        return self.has_tokens or self.client_ca is not None


def add_security_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    add_settings(parser, TlsFiles, SecurityConfig, CallLimits, ConnectionLimits, environ=environ)
    # A secret has no flag: every user of the machine sees the flags of its processes.
    key = (os.environ if environ is None else environ).get("KESTREL_API_KEY") or None
    parser.set_defaults(api_key=key)


def security_config(args: argparse.Namespace) -> SecurityConfig:
    """Raises SettingsError."""
    if args.metrics_client_ca is not None and args.metrics_tls == "off":
        name = name_of(args, "--metrics-client-ca")
        raise SettingsError(
            f"{name} needs TLS, which {name_of(args, '--metrics-tls')}=off turns off"
        )
    return configured(
        SecurityConfig,
        args,
        tls=_tls(args),
        api_key=args.api_key,
        calls=configured(CallLimits, args),
        connections=configured(ConnectionLimits, args),
    )


_TLS_FLAGS = ("--tls-cert", "--tls-key", "--tls-client-ca", "--metrics-client-ca")


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    authorities = (args.tls_client_ca, args.metrics_client_ca)
    if args.tls_client_crl is not None and authorities == (None, None):
        name = name_of(args, "--tls-client-crl")
        raise SettingsError(
            f"{name} needs --tls-client-ca or --metrics-client-ca, whose certificates it revokes"
        )
    given = [flag for flag in _TLS_FLAGS if getattr(args, dest_of(flag))]
    if not given:
        return None
    for flag in _TLS_FLAGS[:2]:
        if flag not in given:
            named = " and ".join(name_of(args, other) for other in given)
            raise SettingsError(
                f"{named}: TLS needs both --tls-cert and --tls-key, {flag} is not given"
            )
    return configured(TlsFiles, args)
