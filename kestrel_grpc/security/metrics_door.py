"""MetricsDoor: who may scrape, and with which certificate the port shows itself. For the threads of its HTTP server.

Tokens and certificate are those of the server, renewed with it. Client certificates are not asked for: Prometheus has
tokens.
"""

from __future__ import annotations

import logging
import ssl
import threading

from ..addresses import AddressError
from .callers import AUTHORIZATION, Callers
from .config import SecurityConfig, TlsFiles
from .listening import is_loopback
from .principal import NotAuthenticated, Scope, ScopeMissing
from .tls import TlsError, check_pair
from .watched_files import WatchedFiles

logger = logging.getLogger(__name__)

UNAUTHORIZED, FORBIDDEN = "401 Unauthorized", "403 Forbidden"


class MetricsDoor:
    """Any thread."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        """``address`` is HOST:PORT. Raises AddressError for one that others can reach and nothing protects, TlsError,
        TokenFileError."""
        asks = security.has_tokens and not security.open_metrics
        tls = security.tls if security.metrics_tls else None
        _check_exposure(address, security, asks=asks, talks_tls=tls is not None)
        self._lock = threading.Lock()
        self._callers = Callers(security) if asks else None
        self._tls = None if tls is None else _Https(tls)

    @property
    def talks_tls(self) -> bool:
        return self._tls is not None

    def refusal(self, authorization: str | None) -> tuple[str, str] | None:
        """HTTP's status and why; None lets it in."""
        if self._callers is None:
            return None
        header = () if authorization is None else ((AUTHORIZATION, authorization),)
        try:
            with self._lock:
                principal = self._callers.of(header, {})
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
        self._watched = WatchedFiles([files.certificate, files.private_key])
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
        return check_pair(self._files)


def _check_exposure(address: str, security: SecurityConfig, *, asks: bool, talks_tls: bool) -> None:
    if security.insecure_listen or is_loopback(address) or (asks and talks_tls):
        return
    missing = [
        *([] if talks_tls else ["TLS (--tls-cert, --tls-key, --metrics-tls on)"]),
        *([] if asks else ["tokens (--auth-tokens or KESTREL_API_KEY, --open-metrics off)"]),
    ]
    raise AddressError(
        f"won't serve metrics on {address}, which others can reach, without {' and '.join(missing)}; "
        "--insecure-listen does it all the same"
    )
