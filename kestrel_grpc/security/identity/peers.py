"""Of whom a connection is, where callers aren't told apart: the address in what gRPC calls a peer."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

_OURS = 64
"""Bits of an IPv6 address that its owner can't choose freely."""


def address_of(peer: str) -> str:
    """Of "ipv4:127.0.0.1:50000" the address without the port, of IPv6 the network; a unix socket has one for all."""
    kind, _, rest = peer.partition(":")
    if kind == "ipv4":
        return rest.rpartition(":")[0]
    if kind != "ipv6":
        return kind
    text = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return kind
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _OURS), strict=False))
