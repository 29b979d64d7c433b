"""The certificate of a peer whose connection Python's ssl made, in gRPC's form."""

from __future__ import annotations

import ssl
from typing import Any

from .callers import CERTIFICATE, AuthContext

_SPIFFE = "spiffe://"


def shown_by(connection: ssl.SSLSocket | ssl.SSLObject | None) -> AuthContext:
    """The names in the peer's certificate, under gRPC's keys; empty without a certificate or without TLS (None)."""
    shown = None if connection is None else connection.getpeercert(binary_form=True)
    if connection is None or shown is None:
        return {}
    found: dict[str, Any] = connection.getpeercert() or {}
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
        CERTIFICATE: [ssl.DER_cert_to_PEM_cert(shown).encode()],
    }
