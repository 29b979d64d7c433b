"""MetricsDoor: checks the credentials of scrapers, and holds the certificate of the metrics port.

It uses the server's tokens and certificate, and renews them like the server. The authorities of scrapers' certificates
are separate (--metrics-tls FILE), because callers of the model and scrapers differ. The threads of the HTTP server use
a MetricsDoor.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import replace

from ..settings.security import SecurityConfig
from .hosts import ANY, Hosts
from .identity.callers import AUTHORIZATION, AuthContext, Callers
from .identity.principal import NotAuthenticated, Scope, ScopeMissing
from .identity.tls import RenewedContext
from .listening import check_reach, is_loopback

_TLS = "TLS (--tls-cert, --tls-key, --metrics-tls)"
_WAYS = "credentials (--auth-tokens or KESTREL_API_KEY, without metrics in --open; or a file of --metrics-tls)"
UNAUTHORIZED, FORBIDDEN = "401 Unauthorized", "403 Forbidden"
MISDIRECTED = "421 Misdirected Request"


class MetricsDoor:
    """The access check of the metrics port. Any thread may use it."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        """``address`` is HOST:PORT. Raises TlsError, TokenFileError, and AddressError for an unprotected address that
        other machines can reach."""
        tls = None if security.metrics_tls == "off" else security.tls
        if tls is not None:
            tls = replace(tls, client_ca=security.metrics_client_ca)
        client_ca = None if tls is None else tls.client_ca
        self._open = security.is_open("metrics")
        """Whether scrapers need no token."""
        asks = client_ca is not None or (security.has_tokens and not self._open)
        if not security.insecure_listen:
            check_reach("serve metrics", address, {_TLS: tls is not None, _WAYS: asks})
        self._lock = threading.Lock()
        self._callers = Callers(security, client_ca) if asks else None
        self._tls = None if tls is None else RenewedContext(tls, "metrics port")
        is_exposed = asks or not is_loopback(address)
        self._hosts = Hosts(address, (ANY,) if is_exposed else (), security)

    @property
    def talks_tls(self) -> bool:
        return self._tls is not None

    def refusal(
        self,
        authorization: str | None,
        connection: AuthContext | None = None,
        host: str = "localhost",
    ) -> tuple[str, str] | None:
        """The HTTP status and the message of a refusal; None if the scraper may read. ``connection``: the result of
        ``certificates.shown_by``. ``host``: the header Host."""
        if not self._hosts.accepts(host):
            return (
                MISDIRECTED,
                f"without credentials there are no metrics for the host {host[:100]!r}",
            )
        if self._callers is None or self._open:
            return None
        header = () if authorization is None else ((AUTHORIZATION, authorization),)
        try:
            with self._lock:
                principal = self._callers.of(header, connection or {})
            principal.check(Scope.METRICS, Scope.ADMIN)
        except NotAuthenticated as error:
            return UNAUTHORIZED, str(error)
        except ScopeMissing as error:
            return FORBIDDEN, str(error)
        return None

    def context(self) -> ssl.SSLContext | None:
        """The TLS context of the next connection; None without TLS."""
        if self._tls is None:
            return None
        with self._lock:
            return self._tls.context()
