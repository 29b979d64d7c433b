"""Guard: the checks at the beginning of every call: its caller, the caller's scopes and limits, and memory.

The checks use only the call's metadata and connection, and run before any of its messages is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ...service_names import (
    CHANNELZ_METHODS,
    HEALTH_METHODS,
    INFERENCE_METHODS,
    LOAD_REPORT_METHODS,
    REFLECTION_METHODS,
)
from ...settings.budgets import token_budget
from ...settings.security import SecurityConfig
from ..connections.accepted_connection import AcceptedSockets
from ..connections.connection_guard import ConnectionGuard
from ..identity.callers import Callers, Metadata
from ..identity.principal import (
    ANONYMOUS,
    Principal,
    Scope,
    address_of,
    is_administrative,
    needed_scopes,
)
from .admission import Admission, Visits
from .budgets import Budgets
from .message_room import Hold, MessageLimits, MessageRoom, copy_s_per_byte
from .refusal_pace import RefusalPace

_ROOM_WAIT_S = 5.0
"""Seconds that a call waits for memory. Most messages take less time to arrive and to be decoded."""
_STRANGERS_SHARE = 8
"""One part in this many of the memory is for health and reflection, whose callers may have no credentials."""
_STRANGERS_WAITING = 512


class Guard:
    """The checks of one server. Of a call's message, the guard knows only the size."""

    def __init__(
        self,
        security: SecurityConfig,
        max_message_bytes: int,
        check_room: Callable[[Principal], None] = lambda principal: None,
        ports: Callable[[], Collection[int]] = lambda: (),
        check_audit: Callable[[], None] | None = None,
    ) -> None:
        """``check_room``: raises an error if the engine could not accept a request of a principal now. ``ports``:
        returns the ports that the server listens on. ``check_audit``: raises an error if administrative calls can't be
        recorded now; None if they need no record. Raises TokenFileError, TlsError."""
        self._check_room, self._check_audit = check_room, check_audit
        self.num_asked = 0
        """Calls that have asked a model since the start."""
        self.limits = security.calls
        self.messages = MessageLimits(max_message_bytes, security.calls.held_bytes)
        self.admission = Admission(security.calls)
        default = token_budget(security.calls.token_budget)
        self.budgets = Budgets(default)
        self._all_have_budgets = bool(default.minute or default.day)
        self.visits = Visits()
        """Calls of health and reflection."""
        self.refusals = RefusalPace()
        self.connections = ConnectionGuard(
            security.connections,
            self.messages.received,
            AcceptedSockets(ports) if AcceptedSockets.can_look() else None,
        )
        self.security = security
        self._callers = Callers(security, security.client_ca)
        copy_s_per_byte()  # Measured now, not during a call.
        callers, strangers = _divided(self.messages)
        self._room = MessageRoom(callers, wait_s=_ROOM_WAIT_S)
        self._strangers_room = MessageRoom(
            strangers, wait_s=_ROOM_WAIT_S, max_waiting=_STRANGERS_WAITING
        )

    def has_budget(self, principal: Principal) -> bool:
        """Whether a principal's tokens may be limited."""
        own = (principal.minute_tokens, principal.day_tokens)
        return self._all_have_budgets or own != (None, None)

    @property
    def held_bytes(self) -> int:
        """Bytes that the messages of all calls in progress hold or have reserved."""
        return self._room.held_bytes + self._strangers_room.held_bytes

    def take_freed_bytes(self) -> int:
        """Bytes freed since the last call of this method: the difference between the messages' largest and current
        sizes, and the memory of connections that were ended."""
        freed = self.connections.take_freed_bytes()
        for room in (self._room, self._strangers_room):
            freed += room.peak_bytes - room.held_bytes
            room.peak_bytes = room.held_bytes
        return freed

    @property
    def limited(self) -> int:
        """Number of calls refused since the start because of a limit."""
        return self.admission.limited + self._room.limited + self._strangers_room.limited

    def principal(self, metadata: Metadata, context: Any) -> Principal:
        """The principal of a call. Raises NotAuthenticated."""
        if not self._callers.asks:
            return ANONYMOUS
        connection = context.auth_context() if self._callers.asks_certificate else {}
        return self._callers.of(metadata, connection)

    def check_scraper(self, metadata: Metadata, context: Any) -> None:
        """Checks that a caller of the model's port may read the metrics. Raises NotAuthenticated, ScopeMissing."""
        if not self.security.is_open("metrics"):
            self.principal(metadata, context).check(Scope.METRICS, Scope.ADMIN)

    def admit(self, principal: Principal, method: str, peer: str) -> AbstractContextManager[Hold]:
        """A context manager around a call of kestrel.v1, which gives the memory of the call's messages. It counts for
        the principal, or for the address if callers need no credentials. Raises ScopeMissing, RateExceeded,
        TooManyCalls, and EngineOverloaded if the engine could not accept the call's request."""
        principal.check(*needed_scopes(method))
        counted = self.admission.admit(principal.name)
        if method.startswith(INFERENCE_METHODS):
            self.num_asked += 1
            self._check_room(principal)
        elif self._check_audit is not None and is_administrative(method):
            self._check_audit()
        return _Admitted(counted, self._room, principal.name or address_of(peer))

    def hold(self, principal: Principal, peer: str) -> Hold:
        """The memory of messages of a caller, empty at first. Close it at the end."""
        return Hold(self._room, principal.name or address_of(peer))

    def visitor(self, method: str, metadata: Metadata, context: Any) -> Principal:
        """The principal of a call of health, reflection, load reports or an unknown method. Raises NotAuthenticated,
        ScopeMissing.

        Load reports need the credentials and the scope of GetLoad, and channelz needs the scope admin. For the other
        methods the principal is ANONYMOUS if the method needs no credentials, or if connections need a certificate,
        which was checked when the connection was made.
        """
        if method.startswith((LOAD_REPORT_METHODS, CHANNELZ_METHODS)):
            principal = self.principal(metadata, context)
            principal.check(*needed_scopes(method))
            return principal
        is_open = (method.startswith(HEALTH_METHODS) and self.security.is_open("health")) or (
            method.startswith(REFLECTION_METHODS) and self.security.is_open("reflection")
        )
        if is_open or self._callers.asks_certificate:
            return ANONYMOUS
        return self._callers.of(metadata, {})

    @contextlib.contextmanager
    def admit_visit(self, principal: Principal, peer: str, *, stream: bool) -> Iterator[Hold]:
        """As ``admit``, for a call of health, reflection or load reports. Raises TooManyCalls."""
        who = principal.name or address_of(peer)
        with (
            self.visits.admit(who, stream=stream),
            contextlib.closing(Hold(self._strangers_room, who)) as hold,
        ):
            yield hold


class _Admitted(Hold, AbstractContextManager[Hold]):
    """The memory of the messages of an admitted call, around the call. ``counted``: counts it for its principal."""

    __slots__ = ("_counted",)

    def __init__(self, counted: AbstractContextManager[None], room: MessageRoom, who: str) -> None:
        super().__init__(room, who)
        self._counted = counted

    def __enter__(self) -> Hold:
        self._counted.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            self.close()
        finally:
            self._counted.__exit__(*exc_info)


def _divided(messages: MessageLimits) -> tuple[int | None, int]:
    """The memory for messages of kestrel.v1, and of health and reflection.

    The second holds at least two messages if that is at most a quarter of all memory.
    """
    if messages.held is None:
        return None, 2 * messages.reserved
    strangers = max(messages.held // _STRANGERS_SHARE, messages.reserved)
    if 8 * messages.reserved <= messages.held:
        strangers = max(strangers, 2 * messages.reserved)
    # If the memory holds only one or two messages, both kinds may use all of it.
    callers = messages.held - strangers
    return (callers if callers >= messages.reserved else messages.held), strangers
