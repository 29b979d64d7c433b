"""The headers with which the front of several workers tells them about a client. This module imports no gRPC.

The front (workers/front) sets them on every call that it forwards, and removes those of the caller. One is of a
worker, for the front.
"""

from __future__ import annotations

PEER_HEADER = "x-kestrel-peer"
"""The client's address, such as 127.0.0.1:50000 or [::1]:50000."""
CERTIFICATE_HEADER = "x-forwarded-client-cert"
"""The client's certificate and the chain to its authority, in Envoy's form: Hash=…;Chain="URL-encoded PEM"."""
NOT_BEGUN = "x-kestrel-not-begun"
"""The trailer of a call that a server refused because its model is not ready, or because it shuts down. The front tries
such a call at another worker, if the refusal is the whole response, and removes the trailer."""
_PREFIXES = ("x-forwarded-", "x-envoy-")


def is_of_front(key: str) -> bool:
    """Whether a header is the front's, and no metadata of the caller."""
    return key == PEER_HEADER or key.startswith(_PREFIXES)
