"""The client address in gRPC's name of a peer. It identifies callers that need no credentials."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

_NETWORK_BITS = 64
"""Bits of an IPv6 address that a client cannot choose freely."""


def address_of(peer: str) -> str:
    """The address of a peer such as "ipv4:127.0.0.1:50000", without the port.

    For IPv6 it is the network. All clients of unix sockets have the same address, "unix".
    """
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
    return str(ipaddress.IPv6Network((int(address), _NETWORK_BITS), strict=False))
