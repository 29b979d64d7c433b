"""The flags of TLS, callers and their limits, and what becomes of them: a SecurityConfig."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping

from .security import CallLimits, ConnectionLimits, SecurityConfig, TlsFiles
from .server import Flags, SettingsError, size, whole
from .sources import name_of

_TLS_FLAGS = ("--tls-cert", "--tls-key", "--tls-client-ca", "--metrics-client-ca")


def add_security_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    flags = Flags(parser, "TLS and callers", section="security", environ=environ)
    flags.add(
        "--tls-cert",
        metavar="FILE",
        shown="no TLS",
        help="the server's certificate chain, PEM; taken anew when the file changes",
    )
    flags.add("--tls-key", metavar="FILE", shown="none", help="its private key, PEM, unencrypted")
    flags.add(
        "--tls-client-ca",
        metavar="FILE",
        shown="clients need no certificate",
        help="clients must show a certificate of these authorities, PEM",
    )
    flags.add(
        "--tls-client-crl",
        metavar="FILE",
        shown="none",
        help="certificates that these authorities have taken back, PEM; taken anew when the file changes; needs "
        "kestrel-grpc[crl]",
    )
    flags.add(
        "--auth-tokens",
        metavar="FILE",
        shown="nobody is asked; KESTREL_API_KEY alone is one token that may do everything",
        help="whose tokens are which, made by 'kestrel-grpc token'; taken anew when the file changes",
    )
    for name in ("health", "reflection"):
        flags.add(
            f"--open-{name}",
            choices=("on", "off"),
            default="on",
            help=f"answer {name} to callers without credentials",
        )
    flags.add(
        "--open-metrics",
        choices=("on", "off"),
        default="off",
        help="answer --metrics-listen without a token of scope metrics, also where callers have tokens",
    )
    flags.add(
        "--metrics-tls",
        choices=("on", "off"),
        default="on",
        help="serve --metrics-listen with the certificate of --tls-cert, if there is one",
    )
    flags.add(
        "--metrics-client-ca",
        metavar="FILE",
        shown="scrapers need no certificate",
        help="scrapers must show a certificate of these authorities to --metrics-listen, PEM",
    )
    flags.add(
        "--insecure-listen",
        choices=("on", "off"),
        nargs="?",
        const="on",
        default="off",
        help="listen beyond loopback even without TLS or without asking who calls",
    )
    # A secret has no flag: every user of the machine sees the flags of its processes.
    key = (os.environ if environ is None else environ).get("KESTREL_API_KEY") or None
    parser.set_defaults(api_key=key)
    _add_limits(parser, environ)


def _add_limits(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None) -> None:
    flags = Flags(
        parser, "limits of calls (0: none) and connections", section="calls", environ=environ
    )
    calls, connections = CallLimits(), ConnectionLimits()
    flags.add(
        "--max-calls",
        type=_count,
        metavar="N",
        default=calls.calls,
        help="a caller's calls in progress",
    )
    flags.add(
        "--max-held-bytes",
        type=size,
        metavar="SIZE",
        default=calls.held_bytes,
        shown="4GiB",
        help="messages of requests in memory, of all callers",
    )
    flags.add(
        "--rate",
        type=_amount,
        metavar="PER_SECOND",
        default=calls.rate,
        shown="0",
        help="a caller's calls a second",
    )
    flags.add(
        "--burst",
        type=_at_least_one,
        metavar="N",
        default=calls.burst,
        help="a caller's calls at once after a pause, where there is a rate",
    )
    flags.add(
        "--max-deadline",
        type=_amount,
        metavar="SECONDS",
        default=calls.deadline_s,
        help="how long a call may take, whatever its caller's deadline",
    )
    flags.add(
        "--write-timeout",
        type=_amount,
        metavar="SECONDS",
        default=calls.write_s,
        help="how long a stream waits for a reader who doesn't read",
    )
    flags.add(
        "--max-metadata-bytes",
        type=size,
        metavar="SIZE",
        default=connections.metadata_bytes,
        shown="16KiB",
        help="metadata of a call",
    )
    flags.add(
        "--max-streams",
        type=_at_least_one,
        metavar="N",
        default=connections.streams,
        help="calls in progress on one connection",
    )
    flags.add(
        "--max-connection-age",
        type=_amount,
        metavar="SECONDS",
        default=connections.age_s,
        help="after how long a client is asked to connect anew (0: never)",
    )
    flags.add(
        "--connection-grace",
        type=_amount,
        metavar="SECONDS",
        shown="10 more than --max-deadline",
        help="how long its calls in progress may go on then",
    )
    flags.add(
        "--keepalive",
        type=_amount,
        metavar="SECONDS",
        default=connections.keepalive_s,
        help="after how much silence a client is asked whether it is still there (0: never)",
    )
    flags.add(
        "--keepalive-timeout",
        type=_above_zero,
        metavar="SECONDS",
        default=connections.keepalive_timeout_s,
        help="how long it has to answer before its connection is closed",
    )


def security_config(args: argparse.Namespace) -> SecurityConfig:
    """Raises SettingsError."""
    _check_scrapers(args)
    return SecurityConfig(
        tls=_tls(args),
        auth_tokens=args.auth_tokens,
        api_key=args.api_key,
        open_health=args.open_health == "on",
        open_reflection=args.open_reflection == "on",
        open_metrics=args.open_metrics == "on",
        metrics_tls=args.metrics_tls == "on",
        metrics_client_ca=args.metrics_client_ca,
        insecure_listen=args.insecure_listen == "on",
        calls=_calls(args),
        connections=_connections(args),
    )


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    authorities = (args.tls_client_ca, args.metrics_client_ca)
    if args.tls_client_crl is not None and authorities == (None, None):
        name = name_of(args, "--tls-client-crl")
        raise SettingsError(
            f"{name} needs --tls-client-ca or --metrics-client-ca: whose lists it has"
        )
    if args.tls_cert is None and args.tls_key is None and authorities == (None, None):
        return None
    for flag, value in (("--tls-cert", args.tls_cert), ("--tls-key", args.tls_key)):
        if value is None:
            given = [other for other in _TLS_FLAGS if getattr(args, _dest(other)) is not None]
            named = " and ".join(name_of(args, other) for other in given)
            raise SettingsError(
                f"{named}: TLS needs both --tls-cert and --tls-key, {flag} is not given"
            )
    return TlsFiles(
        certificate=args.tls_cert,
        private_key=args.tls_key,
        client_ca=args.tls_client_ca,
        client_crl=args.tls_client_crl,
    )


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _check_scrapers(args: argparse.Namespace) -> None:
    """Raises SettingsError for certificates on a port that talks plainly."""
    if args.metrics_client_ca is not None and args.metrics_tls == "off":
        name = name_of(args, "--metrics-client-ca")
        raise SettingsError(
            f"{name} needs TLS, which {name_of(args, '--metrics-tls')}=off turns off"
        )


def _calls(args: argparse.Namespace) -> CallLimits:
    return CallLimits(
        calls=args.max_calls or None,
        held_bytes=args.max_held_bytes or None,
        rate=args.rate or None,
        burst=args.burst,
        deadline_s=args.max_deadline or None,
        write_s=args.write_timeout or None,
    )


def _connections(args: argparse.Namespace) -> ConnectionLimits:
    """Raises SettingsError."""
    if not _LEAST_METADATA <= args.max_metadata_bytes <= _MOST_METADATA:
        name = name_of(args, "--max-metadata-bytes")
        raise SettingsError(
            f"{name}={args.max_metadata_bytes}: must be {_LEAST_METADATA} to {_MOST_METADATA}"
        )
    return ConnectionLimits(
        metadata_bytes=args.max_metadata_bytes,
        streams=args.max_streams,
        age_s=args.max_connection_age or None,
        age_grace_s=args.connection_grace,
        keepalive_s=args.keepalive or None,
        keepalive_timeout_s=args.keepalive_timeout,
    )


_LEAST_METADATA = 1024
_MOST_METADATA = 1024 * 1024
_MOST = 1_000_000.0


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST:
        raise ValueError(f"must be a number from 0 to {_MOST:.0f}")
    return value


def _above_zero(text: str) -> float:
    value = _amount(text)
    if not value:
        raise ValueError("must be above 0")
    return value


def _count(text: str) -> int:
    value = whole(text)
    if not 0 <= value <= _MOST:
        raise ValueError(f"must be from 0 to {_MOST:.0f}")
    return value


def _at_least_one(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise ValueError("must be at least 1")
    return value
