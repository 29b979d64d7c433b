"""TLS of the listeners: reads, checks and renews certificate, key and client authorities.

Each new connection checks the files for changes. Changed files are read and checked together, and used if they are
valid. If they are invalid (a renewal is incomplete, a file is truncated), that is logged once and the old ones stay in
use.
"""

from __future__ import annotations

import logging
import ssl

import grpc

from kestrel_engine import read_small_file

from ...settings.security import TlsFiles
from ..files import WatchedFiles
from .tls_files import TlsError, server_context, watched_paths

logger = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that renew themselves when the files change. Raises TlsError if the files are invalid now."""
    renewal = _Renewal(files)
    return grpc.dynamic_ssl_server_credentials(
        renewal.first,
        renewal.fetch,  # type: ignore[arg-type]  # None is allowed and means no change
        require_client_authentication=files.client_ca is not None,
    )


class _Renewal:
    """Reads changed files. gRPC calls ``fetch`` before every handshake, on its own thread."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(watched_paths(files))
        self._watched.changed()
        self.first = _read(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates, or None to keep the current ones."""
        if not self._watched.changed():
            return None
        try:
            renewed = _read(self._files)
        except TlsError as error:
            logger.error("keeping the old certificate: %s", error)
            return None
        logger.info("using the new certificate %s", self._files.certificate)
        return renewed


class RenewedContext:
    """The TLS context of a port that gRPC does not serve. ``port``: its name in the log. Raises TlsError."""

    def __init__(self, files: TlsFiles, port: str) -> None:
        self._files, self._port = files, port
        self._watched = WatchedFiles(watched_paths(files))
        self._watched.changed()
        self._context = server_context(files)

    def context(self) -> ssl.SSLContext:
        """The context of a new connection. For one thread at a time."""
        if self._watched.changed():
            try:
                self._context = server_context(self._files)
            except TlsError as error:
                logger.error("the %s is keeping the old certificate: %s", self._port, error)
        return self._context


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate = _contents("certificate", files.certificate)
    key = _contents("private key", files.private_key)
    authorities = None if files.client_ca is None else _contents("client CA", files.client_ca)
    server_context(files)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def _contents(what: str, path: str) -> bytes:
    try:
        return read_small_file(path)
    except OSError as error:
        raise TlsError(f"cannot read the {what} {path}: {error.strerror or error}") from None
