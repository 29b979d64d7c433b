"""Principal: who calls, and what that allows. Owns the scopes and which method asks for which.

Stored pictures, shared prefixes and limits belong to a principal, by its name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kestrel_engine import KestrelError

from ...service_names import ADMIN_METHODS, MODEL_METHODS


class Scope(enum.StrEnum):
    """What a token may be good for."""

    INFER = "infer"
    """VisionService, ImageService, ModelService."""
    HIGH = "high"
    """PRIORITY_HIGH."""
    METRICS = "metrics"
    """AdminService's statistics, and the load."""
    ADMIN = "admin"
    """AdminService."""


ALL_SCOPES = frozenset(Scope)


class NotAuthenticated(KestrelError):
    """Base of the errors about who calls."""


class CredentialsMissing(NotAuthenticated):
    """The caller does not say who it is."""


class CredentialsInvalid(NotAuthenticated):
    """What the caller shows is no token, or none that is known."""


class CertificateRevoked(NotAuthenticated):
    """The caller's certificate, or one between it and its authority, was taken back."""


class ScopeMissing(KestrelError):
    """The caller is known, but may not do this."""


@dataclass(frozen=True, slots=True)
class Principal:
    """``name`` is "" for everyone where callers aren't told apart."""

    name: str
    scopes: frozenset[Scope]
    weight: float = 1.0
    """Its share of the server, relative to the principals that call at the same time."""

    def namespace(self, salt: str) -> str:
        """Of the prefix cache: a principal's own, and within it one for every salt."""
        return f"{len(self.name)}:{self.name}{salt}" if self.name else salt

    def check(self, *needed: Scope) -> None:
        """Raises ScopeMissing unless it has one of the scopes ``needed``."""
        if self.scopes.isdisjoint(needed):
            who = f"{self.name} lacks" if self.name else "callers without credentials lack"
            raise ScopeMissing(f"{who} the scope {' or '.join(needed)}")


ANONYMOUS = Principal("", frozenset({Scope.INFER, Scope.HIGH, Scope.METRICS}))
"""Everyone, where callers aren't told apart. Admin is for those who are."""

_STATISTICS = f"{ADMIN_METHODS}GetStatistics"
_LOAD = f"{MODEL_METHODS}GetLoad"


def needed_scopes(method: str) -> tuple[Scope, ...]:
    """One of them is enough. ``method``: like "/kestrel.v1.VisionService/Query"."""
    if method == _STATISTICS:
        return (Scope.METRICS, Scope.ADMIN)
    if method == _LOAD:
        return (Scope.INFER, Scope.METRICS)
    return (Scope.ADMIN,) if method.startswith(ADMIN_METHODS) else (Scope.INFER,)
