"""RevocationLists: refuses client certificates that their authorities have revoked. Holds and renews the lists.

gRPC's core can check lists during a handshake, but its Python API cannot set them (grpcio 1.85). So the handshake
succeeds, and every call is checked here. The package cryptography reads the lists; the extra ``crl`` of this
package installs it.

An expired list still applies to the certificates on it. The server logs that the list has expired, and accepts other
certificates, as gRPC does by default (gRFC A69). Otherwise a failed renewal would stop the service. The same holds for
an authority without a list.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kestrel_engine import clock, read_small_file

from ..files import WatchedFiles
from .principal import CertificateRevoked
from .tls_files import TlsError

if TYPE_CHECKING:
    from cryptography import x509

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_MOST_KNOWN = 4096
_MOST_BYTES = 1 << 26
"""Number of certificates whose result is cached. Reading a certificate takes 30 µs."""
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


class RevocationLists:
    """The lists in one file. Any thread may use it. A call checks the files for changes, at most once a second."""

    def __init__(self, path: str, authorities: Sequence[str]) -> None:
        """``path``: file of lists (PEM). ``authorities``: files of certificates (PEM), one of which must have signed
        each list. Raises TlsError."""
        self._path, self._authorities = path, tuple(authorities)
        self._watched = WatchedFiles([path, *authorities], interval_s=_CHECK_EVERY_S)
        self._watched.changed()
        self._lock = threading.Lock()
        self._lists = _read(path, self._authorities)
        self._known: dict[bytes, str] = {}
        """The reason for the refusal of each certificate; "" for a valid certificate."""
        self._old: set[x509.Name] = set()
        """The issuers whose lists were logged as expired."""
        self._log_expired()

    def check(self, certificates: Sequence[bytes]) -> None:
        """Checks the certificate of a caller and its chain (PEM; an element may hold several certificates). Raises
        CertificateRevoked."""
        with self._lock:
            self._renew()
            for certificate in certificates:
                why = self._known.get(certificate)
                if why is None:
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    why = self._known[certificate] = self._find_refusal(certificate)
                if why:
                    raise CertificateRevoked(why)

    def _find_refusal(self, certificate: bytes) -> str:
        from cryptography import x509

        for shown in x509.load_pem_x509_certificates(certificate):
            for each in self._lists:
                if each.issuer != shown.issuer:
                    continue
                entry = each.get_revoked_certificate_by_serial_number(shown.serial_number)
                if entry is not None:
                    name, serial = shown.subject.rfc4514_string(), f"{shown.serial_number:X}"
                    when = f"{entry.revocation_date_utc:%Y-%m-%d}{_reason(entry)}"
                    return f"the certificate {name!r}, serial {serial}, was revoked on {when}"
        return ""

    def _renew(self) -> None:
        if not self._watched.changed():
            self._log_expired()
            return
        try:
            self._lists = _read(self._path, self._authorities)
        except TlsError as error:
            logger.error("keeping the old revocation lists: %s", error)
        else:
            logger.info("using the new revocation lists of %s", self._path)
            self._old.clear()
        self._known.clear()
        self._log_expired()

    def _log_expired(self) -> None:
        """Logs the expired lists, each once."""
        for each in self._lists:
            until = each.next_update_utc
            if (
                until is not None
                and until < datetime.fromtimestamp(clock.wall(), UTC)
                and each.issuer not in self._old
            ):
                self._old.add(each.issuer)
                logger.error(
                    "the revocation list of %r in %s expired at %s; the certificates on it are still refused",
                    *(each.issuer.rfc4514_string(), self._path, f"{until:%Y-%m-%d %H:%M} UTC"),
                )


def _read(path: str, authorities: Sequence[str]) -> list[x509.CertificateRevocationList]:
    """Raises TlsError."""
    try:
        from cryptography import x509
    except ImportError:
        raise TlsError(
            f"revocation lists {path}: cryptography is not installed; pip install ./clients/python '.[crl]'"
        ) from None
    signers: list[x509.Certificate] = []
    for file in authorities:
        try:
            signers += x509.load_pem_x509_certificates(_contents(file))
        except ValueError as error:
            raise TlsError(f"client CA {file} cannot be used: {error}") from None
    try:
        lists = [x509.load_pem_x509_crl(part) for part in _LIST.findall(_contents(path))]
    except ValueError as error:
        raise TlsError(f"revocation lists {path} cannot be used: {error}") from None
    if not lists:
        raise TlsError(f"revocation lists {path} cannot be used: the file has no list in PEM form")
    for each in lists:
        _check(each, signers, path)
    listed = {each.issuer for each in lists}
    for signer in signers:
        if signer.subject not in listed:
            logger.warning("%s has no list from %r", path, signer.subject.rfc4514_string())
    return lists


def _check(
    each: x509.CertificateRevocationList, signers: Sequence[x509.Certificate], path: str
) -> None:
    """Raises TlsError for a list that no client CA has signed, and for a partial list."""
    issuer = each.issuer.rfc4514_string()
    if not any(
        signer.subject == each.issuer and each.is_signature_valid(signer.public_key())  # type: ignore[arg-type]
        for signer in signers
    ):
        raise TlsError(f"revocation lists {path}: no client CA has signed the list from {issuer!r}")
    if any(extension.critical for extension in each.extensions):
        raise TlsError(
            f"revocation lists {path}: the list from {issuer!r} is a partial list or an update"
        )


def _reason(entry: x509.RevokedCertificate) -> str:
    from cryptography import x509

    try:
        reason = entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except x509.ExtensionNotFound:
        return ""
    return f" ({reason.value})"


def _contents(path: str) -> bytes:
    try:
        return read_small_file(path, _MOST_BYTES)
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror or error}") from None
