"""TLS of the listeners: certificate, key and client authorities. Owns their check and their renewal.

The files are looked at when a connection is made. What has changed is checked as a whole and used from then on; what
doesn't fit together (half of a renewal, a truncated file) is logged once and the old keeps serving.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from ...settings.security import TlsFiles
from ..files.watched_files import WatchedFiles

logger = logging.getLogger(__name__)


class TlsError(Exception):
    """Certificate, key or authorities can't be used; the message says which and why, in one line."""


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files. Raises TlsError if they are of no use now."""
    renewal = _Renewal(files)
    return grpc.dynamic_ssl_server_credentials(
        renewal.first,
        renewal.fetch,  # type: ignore[arg-type]  # None is allowed: no change
        require_client_authentication=files.client_ca is not None,
    )


class _Renewal:
    """``fetch`` is called by gRPC, on a thread of its own, before every handshake."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(watched_paths(files))
        self._watched.changed()
        self.first = _read(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: go on with what there is."""
        if not self._watched.changed():
            return None
        try:
            renewed = _read(self._files)
        except TlsError as error:
            logger.error("kept the old certificate: %s", error)
            return None
        logger.info("took the new certificate %s", self._files.certificate)
        return renewed


def watched_paths(files: TlsFiles) -> list[str]:
    """The files whose change is a renewal."""
    paths = [files.certificate, files.private_key]
    return paths if files.client_ca is None else [*paths, files.client_ca]


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate = _contents("certificate", files.certificate)
    key = _contents("private key", files.private_key)
    authorities = None if files.client_ca is None else _contents("client CA", files.client_ca)
    server_context(files)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context with all of the files. gRPC would fail every handshake with a pair that doesn't match, and say so
    nowhere. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password function OpenSSL would ask for an encrypted key's on the terminal.
        context.load_cert_chain(files.certificate, files.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise TlsError(
            f"certificate {files.certificate} and key {files.private_key} can't be used together: {_why(error)}"
        ) from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise TlsError(f"client CA {files.client_ca} can't be used: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _contents(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"can't read the {what} {path}: {error.strerror or error}") from None


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).lower().replace("_", " ")
