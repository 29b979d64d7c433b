"""Checks that the server's addresses are protected, and adds them to the gRPC server."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..settings.addresses import AddressError, unix_path
from ..settings.security import SecurityConfig

if TYPE_CHECKING:  # The supervisor of workers loads no gRPC.
    import grpc


def check_exposure(addresses: tuple[str, ...], security: SecurityConfig) -> None:
    """Raises AddressError for an address that other machines can reach, unless TLS and credentials protect it."""
    if security.insecure_listen:
        return
    has = {
        "TLS (--tls-cert, --tls-key)": security.tls is not None,
        "credentials (--auth-tokens, KESTREL_API_KEY or --tls-client-ca)": security.knows_callers,
    }
    for address in addresses:
        check_reach("listen", address, has)


def check_reach(what: str, address: str, has: Mapping[str, bool]) -> None:
    """Raises AddressError for an address that other machines can reach, unless ``has`` says of each protection that it
    is there. ``what``: the server does at the address."""
    missing = [name for name, is_there in has.items() if not is_there]
    if missing and not is_loopback(address):
        raise AddressError(
            f"refusing to {what} on {address}, which other machines can reach, without {' and '.join(missing)}; "
            "--insecure-listen allows it"
        )


def check_files_and_addresses(
    security: SecurityConfig, addresses: tuple[str, ...], metrics: str | None
) -> None:
    """Reads the files of tokens and certificates as a starting server does. ``metrics`` is the
    address for scrapers. Opens no port. Raises TokenFileError, AddressError, TlsError."""
    from .identity.callers import Callers
    from .identity.tls import server_credentials
    from .metrics_door import MetricsDoor

    Callers(security, security.client_ca)
    check_exposure(addresses, security)
    if security.tls is not None:
        server_credentials(security.tls)
    if metrics is not None:
        MetricsDoor(metrics, security)


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect. False for names other than localhost, which may resolve to any address."""
    if unix_path(address) is not None:
        return True
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def add_port(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Adds the address to ``server`` and returns its port. Raises AddressError.

    The address uses TLS if ``credentials`` is set and the address is not a unix socket.
    """
    try:
        if credentials is None or unix_path(address) is not None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:  # gRPC's message does not name the cause.
        raise AddressError(f"cannot listen on {address}") from None
