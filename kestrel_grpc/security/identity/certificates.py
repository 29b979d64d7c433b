"""The certificate of a peer in gRPC's form: of a connection that Python's ssl made, or as the front says it.

The front of several workers says a client's address and certificate in headers. A worker believes them only on the
socket in the front's private folder.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .callers import AuthContext
from .front_headers import CERTIFICATE_HEADER

_SPIFFE = "spiffe://"
_CHAIN = "Chain="


def shown_by(connection: ssl.SSLSocket | ssl.SSLObject | None) -> AuthContext:
    """The names in the peer's certificate, under gRPC's keys; empty without a certificate or without TLS (None)."""
    found: dict[str, Any] = (connection and connection.getpeercert()) or {}
    if not found:
        return {}
    subject = [pair for part in found.get("subject", ()) for pair in part]
    others = found.get("subjectAltName", ())
    ids = [name for kind, name in others if kind == "URI"]
    return {
        # Like gRPC, sets no id if there are several.
        "peer_spiffe_id": [
            uri.encode() for uri in ids if len(ids) == 1 and uri.startswith(_SPIFFE)
        ],
        "x509_common_name": [value.encode() for name, value in subject if name == "commonName"],
        "x509_subject_alternative_name": [str(name).encode() for _, name in others],
    }


def peer_of(address: str) -> str:
    """A client's address in gRPC's form, as ``context.peer()`` returns it."""
    if not address.startswith("["):
        return f"ipv4:{address}"
    host, _, port = address.rpartition(":")
    return f"ipv6:{host.replace('[', '%5B').replace(']', '%5D')}:{port}"


def certificate_of(headers: Mapping[str, str]) -> AuthContext:
    """The names in the client's certificate, under gRPC's keys; empty if the client showed none."""
    return _read(headers.get(CERTIFICATE_HEADER, ""))


@functools.lru_cache(maxsize=256)
def _read(header: str) -> AuthContext:
    chain = next((part for part in header.split(";") if part.startswith(_CHAIN)), "")
    pem = unquote(chain.removeprefix(_CHAIN).strip('"')).encode()
    if not pem:
        return {}
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    own = x509.load_pem_x509_certificates(pem)[0]
    subject = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    try:
        others = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        others = x509.SubjectAlternativeName([])
    uris = others.get_values_for_type(x509.UniformResourceIdentifier)
    return {
        # Like gRPC, sets no id if there are several.
        "peer_spiffe_id": [u.encode() for u in uris if len(uris) == 1 and u.startswith(_SPIFFE)],
        "x509_common_name": [str(name.value).encode() for name in subject],
        "x509_subject_alternative_name": [str(name.value).encode() for name in others],
    }
