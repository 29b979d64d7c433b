"""Callers: finds the principal of a call from its metadata and connection. Holds and renews the credentials.

If the call has a token, the token identifies the caller. Otherwise the certificate of the connection does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ...settings.security import SecurityConfig
from ..files import WatchedFiles
from .principal import (
    ALL_SCOPES,
    ANONYMOUS,
    CredentialsInvalid,
    CredentialsMissing,
    Principal,
    Scope,
)
from .tokens import Credentials, TokenFileError, add_api_key, read_credentials

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
_CHECK_EVERY_S = 1.0

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


class Callers:
    """The callers of one port, for one event loop. A call checks the file of tokens, at most once a second."""

    def __init__(self, security: SecurityConfig, client_ca: str | None = None) -> None:
        """``client_ca``: this port's authorities; None if clients need no certificate. Raises TokenFileError."""
        self._security = security
        path = security.auth_tokens
        self._watched = WatchedFiles([path] if path else [], interval_s=_CHECK_EVERY_S)
        self._watched.changed()
        self._credentials = self._read()
        self.asks_certificate = client_ca is not None
        self.asks = security.has_tokens or self.asks_certificate
        """Whether callers need credentials."""

    def of(self, metadata: Metadata, connection: AuthContext) -> Principal:
        """The principal of a call. Raises CredentialsMissing, CredentialsInvalid."""
        if not self.asks:
            return ANONYMOUS
        self._renew()
        token = _bearer(metadata)
        if token is not None and self._security.has_tokens:
            principal = self._credentials.of_token(token)
            if principal is None:
                raise CredentialsInvalid("the token is not known to this server")
            return principal
        identity = identity_of(connection) if self.asks_certificate else ""
        if not identity:
            raise CredentialsMissing(
                "the call needs a token: metadata 'authorization: Bearer TOKEN'"
            )
        return self._find_identity(identity)

    def _find_identity(self, identity: str) -> Principal:
        listed = self._credentials.by_identity.get(identity)
        if listed is not None:
            return listed
        if self._security.has_tokens:
            raise CredentialsInvalid(f"the certificate {identity!r} is not in the file of tokens")
        return Principal(f"cert:{identity}", ALL_SCOPES - {Scope.ADMIN})

    def _renew(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._credentials = self._read()
        except TokenFileError as error:
            logger.error("keeping the old tokens: %s", error)
        else:
            logger.info("using the new tokens of %s", self._security.auth_tokens)

    def _read(self) -> Credentials:
        path, key = self._security.auth_tokens, self._security.api_key
        credentials = read_credentials(path) if path else Credentials()
        if key:
            add_api_key(credentials, key)
        return credentials


def identity_of(connection: AuthContext) -> str:
    """The name in the connection's certificate: its SPIFFE id, or else its common name, or else its first alternative
    name; "" without a certificate."""
    for key in ("peer_spiffe_id", "x509_common_name", "x509_subject_alternative_name"):
        for value in connection.get(key, ()):
            if value:
                return value.decode(errors="replace")
    return ""


def _bearer(metadata: Metadata) -> str | None:
    """The token in the call's metadata; None without the header. Raises CredentialsInvalid."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise CredentialsInvalid("metadata 'authorization' must be one 'Bearer TOKEN'")
    return token.strip()
