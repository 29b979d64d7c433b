"""Where the server may listen, given what protects it."""

from __future__ import annotations

import ipaddress

import grpc

from ..settings.addresses import AddressError, unix_path
from ..settings.security import SecurityConfig


def check_exposure(addresses: tuple[str, ...], security: SecurityConfig) -> None:
    """Raises AddressError for an address that others could reach, unless TLS and callers' names protect it."""
    if security.insecure_listen or (security.tls is not None and security.knows_callers):
        return
    missing = [
        *(["TLS (--tls-cert, --tls-key)"] if security.tls is None else []),
        *(
            []
            if security.knows_callers
            else ["a way to know who calls (--auth-tokens, KESTREL_API_KEY, --tls-client-ca)"]
        ),
    ]
    for address in addresses:
        if not is_loopback(address):
            raise AddressError(
                f"won't listen on {address}, which others can reach, without {' and '.join(missing)}; "
                "--insecure-listen does it all the same"
            )


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect. A name other than localhost may resolve to anything."""
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
    """Adds the address, with TLS if there are ``credentials`` and it isn't a unix socket; returns its port. Raises
    AddressError."""
    try:
        if credentials is None or unix_path(address) is not None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:  # gRPC says no more than that it failed.
        raise AddressError(f"cannot listen on {address}") from None
