"""Checks the security settings without starting a server, for ``serve --print-config``."""

from __future__ import annotations

from ..settings.security import SecurityConfig
from .identity.callers import Callers
from .identity.tls import server_credentials
from .listening import check_exposure
from .metrics_door import MetricsDoor


def check_files_and_addresses(
    security: SecurityConfig, addresses: tuple[str, ...], metrics: str | None
) -> None:
    """Reads the files of tokens, certificates and revocation lists as a starting server does. ``metrics`` is the
    address for scrapers. Opens no port. Raises TokenFileError, AddressError, TlsError."""
    Callers(security, security.client_ca)
    check_exposure(addresses, security)
    if security.tls is not None:
        server_credentials(security.tls)
    if metrics is not None:
        MetricsDoor(metrics, security)
