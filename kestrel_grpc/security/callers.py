"""Callers: from a call's metadata and connection to its principal. Owns the credentials in force and their renewal.

The token counts if the call brings one, else the certificate of its connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from .config import SecurityConfig
from .principal import (
    ALL_SCOPES,
    ANONYMOUS,
    CredentialsInvalid,
    CredentialsMissing,
    Principal,
    Scope,
)
from .tokens import Credentials, TokenFileError, add_api_key, read_credentials
from .watched_files import WatchedFiles

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
_LOOK_EVERY_S = 1.0

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


class Callers:
    """For one event loop. The file of tokens is looked at once a second, when somebody calls."""

    def __init__(self, security: SecurityConfig) -> None:
        """Raises TokenFileError."""
        self._security = security
        path = security.auth_tokens
        self._watched = WatchedFiles([path] if path else [], interval_s=_LOOK_EVERY_S)
        self._watched.changed()
        self._credentials = self._read()
        self.asks = security.knows_callers
        """Whether callers must say who they are."""
        self.asks_certificate = security.tls is not None and security.tls.client_ca is not None

    def of(self, metadata: Metadata, connection: AuthContext) -> Principal:
        """Raises CredentialsMissing, CredentialsInvalid."""
        if not self.asks:
            return ANONYMOUS
        self._renew()
        token = _bearer(metadata)
        if token is not None and self._security.has_tokens:
            principal = self._credentials.of_token(token)
            if principal is None:
                raise CredentialsInvalid("the token is not known here")
            return principal
        identity = identity_of(connection) if self.asks_certificate else ""
        if not identity:
            raise CredentialsMissing(
                "the call needs a token: metadata 'authorization: Bearer TOKEN'"
            )
        return self._of_identity(identity)

    def _of_identity(self, identity: str) -> Principal:
        listed = self._credentials.by_identity.get(identity)
        if listed is not None:
            return listed
        if self._security.has_tokens:
            raise CredentialsInvalid(f"the certificate {identity!r} has no line among the tokens")
        return Principal(f"cert:{identity}", ALL_SCOPES - {Scope.ADMIN})

    def _renew(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._credentials = self._read()
        except TokenFileError as error:
            logger.error("kept the old tokens: %s", error)
        else:
            logger.info("took the new tokens of %s", self._security.auth_tokens)

    def _read(self) -> Credentials:
        path, key = self._security.auth_tokens, self._security.api_key
        credentials = read_credentials(path) if path else Credentials()
        if key:
            add_api_key(credentials, key)
        return credentials


def identity_of(connection: AuthContext) -> str:
    """Whose certificate the connection has: its SPIFFE id, else its common name, else its first alternative name."""
    for key in ("peer_spiffe_id", "x509_common_name", "x509_subject_alternative_name"):
        for value in connection.get(key, ()):
            if value:
                return value.decode(errors="replace")
    return ""


def _bearer(metadata: Metadata) -> str | None:
    """The call's token; None without the header. Raises CredentialsInvalid."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise CredentialsInvalid("metadata 'authorization' must be one 'Bearer TOKEN'")
    return token.strip()
