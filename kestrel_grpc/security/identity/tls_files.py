"""The files of TLS: which they are, and whether they can be used together. This module imports no gRPC."""

from __future__ import annotations

import errno
import ssl

from kestrel_engine import read_small_file

from ...settings.security import TlsFiles


class TlsError(Exception):
    """A certificate, key or file of authorities cannot be used. The message names file and cause in one line."""


def watched_paths(files: TlsFiles) -> list[str]:
    """The files whose change causes a renewal."""
    paths = [files.certificate, files.private_key]
    return paths if files.client_ca is None else [*paths, files.client_ca]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A TLS context made from all files. Raises TlsError.

    gRPC does not report a certificate and key that do not match; every handshake would fail.
    """
    for path in watched_paths(files):
        _check_regular(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this function, OpenSSL would ask for an encrypted key's password on the terminal.
        context.load_cert_chain(files.certificate, files.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise TlsError(
            f"certificate {files.certificate} and key {files.private_key} cannot be used together: {_why(error)}"
        ) from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise TlsError(f"client CA {files.client_ca} cannot be used: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_regular(path: str) -> None:
    """OpenSSL would wait for a FIFO, and read a device without end."""
    try:
        read_small_file(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise TlsError(f"cannot read {path}: {error.strerror}") from None


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).lower().replace("_", " ")
