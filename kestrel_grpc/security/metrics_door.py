"""MetricsDoor: who may scrape, and with which certificate the port shows itself. For the threads of its HTTP server.

Tokens, certificate and revocation lists are those of the server, renewed with it. The authorities of scrapers'
certificates are their own (--metrics-client-ca): who may ask the model isn't who may scrape.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from dataclasses import replace
from typing import Any

from ..settings.addresses import AddressError
from ..settings.security import SecurityConfig, TlsFiles
from .files.watched_files import WatchedFiles
from .identity.callers import AUTHORIZATION, CERTIFICATE, AuthContext, Callers
from .identity.principal import NotAuthenticated, Scope, ScopeMissing
from .identity.tls import TlsError, server_context, watched_paths
from .listening import is_loopback

logger = logging.getLogger(__name__)
_WAYS = "a way to know who scrapes (--auth-tokens or KESTREL_API_KEY with --open-metrics off, --metrics-client-ca)"
UNAUTHORIZED, FORBIDDEN = "401 Unauthorized", "403 Forbidden"
_SPIFFE = "spiffe://"


class MetricsDoor:
    """Any thread."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        """``address`` is HOST:PORT. Raises AddressError for one that others can reach and nothing protects, TlsError,
        TokenFileError."""
        tls = security.tls if security.metrics_tls else None
        if tls is not None:
            tls = replace(tls, client_ca=security.metrics_client_ca)
        client_ca = None if tls is None else tls.client_ca
        self._open = security.open_metrics
        """To whoever can connect."""
        asks = client_ca is not None or (security.has_tokens and not self._open)
        _check_exposure(address, security, asks=asks, talks_tls=tls is not None)
        self._lock = threading.Lock()
        self._callers = Callers(security, client_ca) if asks else None
        self._tls = None if tls is None else _Https(tls)

    @property
    def talks_tls(self) -> bool:
        return self._tls is not None

    def refusal(
        self, authorization: str | None, connection: AuthContext | None = None
    ) -> tuple[str, str] | None:
        """HTTP's status and why; None lets it in. ``connection``: what ``shown_by`` found."""
        if self._callers is None:
            return None
        header = () if authorization is None else ((AUTHORIZATION, authorization),)
        try:
            if self._open:
                self._callers.check_revoked(connection or {})
                return None
            with self._lock:
                principal = self._callers.of(header, connection or {})
            principal.check(Scope.METRICS, Scope.ADMIN)
        except NotAuthenticated as error:
            return UNAUTHORIZED, str(error)
        except ScopeMissing as error:
            return FORBIDDEN, str(error)
        return None

    def context(self) -> ssl.SSLContext | None:
        """For the next connection; None talks plainly."""
        if self._tls is None:
            return None
        with self._lock:
            return self._tls.context()


class _Https:
    """Looked at for every connection; what doesn't fit together is logged once, and the old keeps serving."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(watched_paths(files))
        self._watched.changed()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        if self._watched.changed():
            try:
                self._context = self._read()
            except TlsError as error:
                logger.error("metrics kept the old certificate: %s", error)
        return self._context

    def _read(self) -> ssl.SSLContext:
        return server_context(self._files)


def shown_by(connection: socket.socket) -> AuthContext:
    """What the other side's certificate says, by gRPC's names; nothing without one."""
    shown = (
        connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
    )
    if shown is None:
        return {}
    assert isinstance(connection, ssl.SSLSocket)
    found: dict[str, Any] = connection.getpeercert() or {}
    subject = [pair for part in found.get("subject", ()) for pair in part]
    others = found.get("subjectAltName", ())
    ids = [name for kind, name in others if kind == "URI"]
    return {
        # As gRPC has it: no id if there are several.
        "peer_spiffe_id": [
            uri.encode() for uri in ids if len(ids) == 1 and uri.startswith(_SPIFFE)
        ],
        "x509_common_name": [value.encode() for name, value in subject if name == "commonName"],
        "x509_subject_alternative_name": [str(name).encode() for _, name in others],
        CERTIFICATE: [ssl.DER_cert_to_PEM_cert(shown).encode()],
    }


def _check_exposure(address: str, security: SecurityConfig, *, asks: bool, talks_tls: bool) -> None:
    if security.insecure_listen or is_loopback(address) or (asks and talks_tls):
        return
    missing = [
        *([] if talks_tls else ["TLS (--tls-cert, --tls-key, --metrics-tls on)"]),
        *([] if asks else [_WAYS]),
    ]
    raise AddressError(
        f"won't serve metrics on {address}, which others can reach, without {' and '.join(missing)}; "
        "--insecure-listen does it all the same"
    )
