"""The flags of TLS, callers and their limits, and what becomes of them: a SecurityConfig."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..settings import Flags, SettingsError
from .config import SecurityConfig, TlsFiles


def add_security_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    flags = Flags(parser.add_argument_group("TLS and callers"), environ)
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
        "--insecure-listen",
        choices=("on", "off"),
        nargs="?",
        const="on",
        default="off",
        help="listen beyond loopback even without TLS or without asking who calls",
    )


def security_config(args: argparse.Namespace) -> SecurityConfig:
    """Raises SettingsError."""
    return SecurityConfig(tls=_tls(args), insecure_listen=args.insecure_listen == "on")


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    if args.tls_cert is None and args.tls_key is None and args.tls_client_ca is None:
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise SettingsError("TLS needs both --tls-cert and --tls-key")
    return TlsFiles(
        certificate=args.tls_cert, private_key=args.tls_key, client_ca=args.tls_client_ca
    )
