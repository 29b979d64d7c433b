"""Principal: the name, scopes and weight of a caller, and the scopes that methods need.

Stored images, shared prefixes and limits belong to a principal, by its name. A caller that needs no credentials has
none; its limits go by its address.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
from dataclasses import dataclass
from urllib.parse import unquote

from kestrel_engine import KestrelError

from ...service_names import ADMIN_METHODS, CHANNELZ_METHODS, LOAD_REPORT_METHODS, MODEL_METHODS


class Scope(enum.StrEnum):
    """A permission of a token."""

    INFER = "infer"
    """VisionService, ImageService, ModelService, BatchService."""
    HIGH = "high"
    """PRIORITY_HIGH."""
    METRICS = "metrics"
    """AdminService's statistics, and the load."""
    ADMIN = "admin"
    """AdminService, and gRPC's channelz."""


ALL_SCOPES = frozenset(Scope)


class NotAuthenticated(KestrelError):
    """Base class of the errors about credentials."""


class CredentialsMissing(NotAuthenticated):
    """The call has no credentials."""


class CredentialsInvalid(NotAuthenticated):
    """The call's credentials are malformed or unknown."""


class ScopeMissing(KestrelError):
    """The caller is known, but lacks the scope that the method needs."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. ``name`` is "" for all callers if the server needs no credentials."""

    name: str
    scopes: frozenset[Scope]
    weight: float = 1.0
    """The principal's share of the server, relative to the other principals that call at the same time."""
    minute_tokens: int | None = None
    """The principal's budget of tokens a minute, 0 for no limit; None for the server's default, as the next one."""
    day_tokens: int | None = None

    def namespace(self, salt: str) -> str:
        """The namespace of the prefix cache. Each principal has its own, with one for every salt in it."""
        return f"{len(self.name)}:{self.name}{salt}" if self.name else salt

    def check(self, *needed: Scope) -> None:
        """Raises ScopeMissing unless the principal has one of the scopes ``needed``."""
        if self.scopes.isdisjoint(needed):
            who = f"{self.name} lacks" if self.name else "callers without credentials lack"
            raise ScopeMissing(f"{who} the scope {' or '.join(needed)}")


ANONYMOUS = Principal("", frozenset({Scope.INFER, Scope.HIGH, Scope.METRICS}))
"""All callers of a server that needs no credentials. They do not have the scope admin."""

_STATISTICS = f"{ADMIN_METHODS}GetStatistics"
_LOAD = f"{MODEL_METHODS}GetLoad"
_NETWORK_BITS = 64
"""Bits of an IPv6 address that a client cannot choose freely."""


@functools.lru_cache
def needed_scopes(method: str) -> tuple[Scope, ...]:
    """The scopes for a method, of which one is enough. ``method``: for example "/kestrel.v1.VisionService/Query"."""
    if method == _STATISTICS:
        return (Scope.METRICS, Scope.ADMIN)
    if method == _LOAD or method.startswith(LOAD_REPORT_METHODS):
        return (Scope.INFER, Scope.METRICS)
    is_admins = method.startswith((ADMIN_METHODS, CHANNELZ_METHODS))
    return (Scope.ADMIN,) if is_admins else (Scope.INFER,)


def is_administrative(method: str) -> bool:
    """Whether a method is AdminService's, and needs the scope admin."""
    return method.startswith(ADMIN_METHODS) and needed_scopes(method) == (Scope.ADMIN,)


@functools.lru_cache(maxsize=1024)
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
