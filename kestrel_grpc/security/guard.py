"""Guard: what the edge of every call asks first. Owns the order: who calls, whether they may, whether there is room."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ..settings.security import SecurityConfig
from .admission import Admission
from .callers import Callers, Metadata
from .principal import NotAuthenticated, Principal, needed_scopes

_VISION = "/kestrel.v1.VisionService/"
_HEALTH = "/grpc.health."
_REFLECTION = "/grpc.reflection."


class Guard:
    """Made once a server; nothing of a call's message is known to it but its size."""

    def __init__(
        self,
        security: SecurityConfig,
        max_message_bytes: int,
        check_room: Callable[[], None] = lambda: None,
    ) -> None:
        """``check_room`` raises if the model could not take a request now. Raises TokenFileError, TlsError."""
        self._check_room = check_room
        self.limits = security.calls
        self.admission = Admission(security.calls, max_message_bytes)
        self._security = security
        self._callers = Callers(security, security.client_ca)

    def principal(self, method: str, metadata: Metadata, context: Any) -> Principal:
        """Who calls, if they may call the method. Raises NotAuthenticated, ScopeMissing."""
        connection = context.auth_context() if self._callers.asks_certificate else {}
        principal = self._callers.of(metadata, connection)
        principal.check(*needed_scopes(method))
        return principal

    def admit(self, principal: Principal, num_bytes: int) -> AbstractContextManager[None]:
        """Around a call whose message has ``num_bytes``. Raises EngineOverloaded, MessageTooLarge."""
        return self.admission.admit(principal.name, num_bytes)

    def check_room(self, method: str) -> None:
        """For a call that was admitted. Raises EngineOverloaded."""
        if method.startswith(_VISION):
            self._check_room()

    @property
    def asks_connections(self) -> bool:
        """Whether ``check_connection`` may refuse a call."""
        return self._callers.revocation is not None

    def check_connection(self, context: Any) -> None:
        """Of a call of health or reflection, open or not. Raises CertificateRevoked."""
        self._callers.check_revoked(context.auth_context())

    def door(self, details: grpc.HandlerCallDetails) -> NotAuthenticated | None:
        """Why a call of health, reflection or an unknown method is refused; None lets it in. A certificate was
        checked when the connection was made, so on one that asks for certificates the caller is known by now."""
        method = details.method
        is_open = (method.startswith(_HEALTH) and self._security.open_health) or (
            method.startswith(_REFLECTION) and self._security.open_reflection
        )
        if is_open or self._callers.asks_certificate:
            return None
        try:
            self._callers.of(details.invocation_metadata or (), {})
        except NotAuthenticated as error:
            return error
        return None
