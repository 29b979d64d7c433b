"""RevocationLists: client certificates that their authorities took back. Owns the lists in force and their renewal.

gRPC's core can ask lists during a handshake, but Python can't tell it to: its credentials take certificates and keys
only (grpcio 1.85). So the handshake succeeds, and every call asks here. cryptography reads the lists; the extra
kestrel-grpc[crl] brings it.

A list that is out of date still says who is on it; it is logged, and shuts nobody else out, as gRPC's own default is
(gRFC A69): a renewal that failed would otherwise stop the service. The same holds for an authority without a list.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.watched_files import WatchedFiles
from .principal import CertificateRevoked
from .tls import TlsError

if TYPE_CHECKING:
    from cryptography import x509

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_MOST_KNOWN = 4096
"""Certificates whose verdict is kept: reading one takes 30 µs."""
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


class RevocationLists:
    """Any thread. The file of lists and those of authorities are looked at once a second, when somebody calls."""

    def __init__(self, path: str, authorities: Sequence[str]) -> None:
        """``path``: lists, PEM. ``authorities``: files of certificates, PEM; one of them must have signed each list.
        Raises TlsError."""
        self._path, self._authorities = path, tuple(authorities)
        self._watched = WatchedFiles([path, *authorities], interval_s=_LOOK_EVERY_S)
        self._watched.changed()
        self._lock = threading.Lock()
        self._lists = _read(path, self._authorities)
        self._known: dict[bytes, str] = {}
        """By certificate: why it is refused; "" for one that is not."""
        self._old: set[x509.Name] = set()
        """Of whom a list was said to be out of date."""
        self._tell_old()

    def check(self, certificates: Sequence[bytes]) -> None:
        """``certificates``: a caller's, PEM, and those between it and its authority, one or more in each. Raises
        CertificateRevoked."""
        with self._lock:
            self._renew()
            for certificate in certificates:
                why = self._known.get(certificate)
                if why is None:
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    why = self._known[certificate] = self._why(certificate)
                if why:
                    raise CertificateRevoked(why)

    def _why(self, certificate: bytes) -> str:
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
            self._tell_old()
            return
        try:
            self._lists = _read(self._path, self._authorities)
        except TlsError as error:
            logger.error("kept the old revocation lists: %s", error)
        else:
            logger.info("took the new revocation lists of %s", self._path)
            self._old.clear()
        self._known.clear()
        self._tell_old()

    def _tell_old(self) -> None:
        """Logs which lists are out of date, each once."""
        for each in self._lists:
            until = each.next_update_utc
            if until is not None and until < datetime.now(UTC) and each.issuer not in self._old:
                self._old.add(each.issuer)
                logger.error(
                    "the revocation list of %r in %s is out of date since %s; who is on it stays refused",
                    *(each.issuer.rfc4514_string(), self._path, f"{until:%Y-%m-%d %H:%M} UTC"),
                )


def _read(path: str, authorities: Sequence[str]) -> list[x509.CertificateRevocationList]:
    """Raises TlsError."""
    try:
        from cryptography import x509
    except ImportError:
        raise TlsError(
            f"revocation lists {path}: cryptography is not installed; the extra kestrel-grpc[crl] brings it"
        ) from None
    signers: list[x509.Certificate] = []
    for file in authorities:
        try:
            signers += x509.load_pem_x509_certificates(_contents(file))
        except ValueError as error:
            raise TlsError(f"client CA {file} can't be used: {error}") from None
    try:
        lists = [x509.load_pem_x509_crl(part) for part in _LIST.findall(_contents(path))]
    except ValueError as error:
        raise TlsError(f"revocation lists {path} can't be used: {error}") from None
    if not lists:
        raise TlsError(f"revocation lists {path} can't be used: there is none in PEM")
    for each in lists:
        _check(each, signers, path)
    listed = {each.issuer for each in lists}
    for signer in signers:
        if signer.subject not in listed:
            logger.warning("%s has no list of %r", path, signer.subject.rfc4514_string())
    return lists


def _check(
    each: x509.CertificateRevocationList, signers: Sequence[x509.Certificate], path: str
) -> None:
    """Raises TlsError for a list that nobody we know signed, or that isn't whole."""
    of = each.issuer.rfc4514_string()
    if not any(
        signer.subject == each.issuer and each.is_signature_valid(signer.public_key())  # type: ignore[arg-type]
        for signer in signers
    ):
        raise TlsError(
            f"revocation lists {path}: that of {of!r} is signed by none of the client CAs"
        )
    if any(extension.critical for extension in each.extensions):
        raise TlsError(
            f"revocation lists {path}: that of {of!r} is a part of one or an update to one"
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
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"can't read {path}: {error.strerror or error}") from None
