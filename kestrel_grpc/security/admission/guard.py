"""Guard: what the edge of every call asks first. Owns the order: who calls, whether they may, whether there is room.

All of it is decided from a call's metadata and connection, before any of its messages is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from ...service_names import HEALTH_METHODS, REFLECTION_METHODS, VISION_METHODS
from ...settings.security import SecurityConfig
from ..connections.accepted import AcceptedSockets
from ..connections.connection_guard import ConnectionGuard
from ..identity.callers import Callers, Metadata
from ..identity.peers import address_of
from ..identity.principal import ANONYMOUS, Principal, needed_scopes
from .admission import Admission
from .message_limits import MessageLimits
from .message_room import Hold, MessageRoom, copy_s_per_byte
from .visits import Visits

_ROOM_WAIT_S = 5.0
"""How long a call waits for room: longer than most messages take to arrive and be decoded."""
_STRANGERS_SHARE = 8
"""One part in so many of all room is for messages to health and reflection, which may be strangers'."""
_STRANGERS_WAITING = 512


class Guard:
    """Made once a server; nothing of a call's message is known to it but its size."""

    def __init__(
        self,
        security: SecurityConfig,
        max_message_bytes: int,
        check_room: Callable[[], None] = lambda: None,
        ports: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """``check_room`` raises if the model could not take a request now. ``ports``: those that the server listens on.
        Raises TokenFileError, TlsError."""
        self._check_room = check_room
        self.limits = security.calls
        self.messages = MessageLimits(max_message_bytes, security.calls.held_bytes)
        self.admission = Admission(security.calls)
        self.visits = Visits()
        """Calls of health and reflection."""
        self.connections = ConnectionGuard(
            security.connections,
            self.messages.received,
            AcceptedSockets(ports) if AcceptedSockets.can_look() else None,
        )
        self._security = security
        self._callers = Callers(security, security.client_ca)
        copy_s_per_byte()  # Measured now, not during a call.
        ours, strangers = _divided(self.messages)
        self._room = MessageRoom(ours, wait_s=_ROOM_WAIT_S)
        self._strangers_room = MessageRoom(
            strangers, wait_s=_ROOM_WAIT_S, max_waiting=_STRANGERS_WAITING
        )

    @property
    def held_bytes(self) -> int:
        """What messages hold, or have reserved, of all calls in progress."""
        return self._room.held_bytes + self._strangers_room.held_bytes

    def take_freed_bytes(self) -> int:
        """How much more messages held at their most, since this was last asked, than they hold now; and what
        connections held that were ended."""
        freed = self.connections.take_freed_bytes()
        for room in (self._room, self._strangers_room):
            freed += room.peak_bytes - room.held_bytes
            room.peak_bytes = room.held_bytes
        return freed

    @property
    def refused(self) -> int:
        """How many calls were told to come back later, since the start."""
        return self.admission.refused + self._room.refused + self._strangers_room.refused

    def principal(self, metadata: Metadata, context: Any) -> Principal:
        """Who calls. Raises NotAuthenticated."""
        connection = context.auth_context() if self._callers.asks_certificate else {}
        return self._callers.of(metadata, connection)

    def admit(self, principal: Principal, method: str) -> AbstractContextManager[None]:
        """Around a call of kestrel.v1. Raises ScopeMissing; entering raises RateExceeded, TooManyCalls."""
        principal.check(*needed_scopes(method))
        return self.admission.admit(principal.name)

    def check_room(self, method: str) -> None:
        """For a call that was admitted: whether the model could take its request. Raises EngineOverloaded."""
        if method.startswith(VISION_METHODS):
            self._check_room()

    def hold(self, principal: Principal, peer: str) -> Hold:
        """What the messages of an admitted call hold. Callers without names are told apart by their addresses."""
        return self._room.hold(principal.name or address_of(peer))

    def visitor(self, method: str, metadata: Metadata, context: Any) -> Principal:
        """Who calls health, reflection or an unknown method; nobody in particular where these are open. A certificate
        was checked when the connection was made, so on one that asks for certificates the caller is known by now.
        Raises NotAuthenticated."""
        is_open = (method.startswith(HEALTH_METHODS) and self._security.open_health) or (
            method.startswith(REFLECTION_METHODS) and self._security.open_reflection
        )
        if self._callers.asks_certificate:
            connection = context.auth_context()
            self._callers.check_revoked(connection)
            return ANONYMOUS
        return ANONYMOUS if is_open else self._callers.of(metadata, {})

    def hold_visit(self, address: str) -> Hold:
        """What the messages of a call of health or reflection hold."""
        return self._strangers_room.hold(address)


def _divided(messages: MessageLimits) -> tuple[int | None, int]:
    """The room of callers, and of strangers: two messages at least where that is at most a quarter of all."""
    if messages.held is None:
        return None, 2 * messages.reserved
    strangers = max(messages.held // _STRANGERS_SHARE, messages.reserved)
    if 8 * messages.reserved <= messages.held:
        strangers = max(strangers, 2 * messages.reserved)
    # Where all room is that of a message or two, both kinds have it.
    ours = messages.held - strangers
    return (ours if ours >= messages.reserved else messages.held), strangers
