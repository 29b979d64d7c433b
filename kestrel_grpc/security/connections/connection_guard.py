"""ConnectionGuard: which connections are ended, so that no caller takes all of them or fills the core's memory.

gRPC bounds the number of all connections, and nothing else of them. It tells the server of a call once its headers are
complete: headers without end stay in the core's memory unseen. Nor does the core bound headers until the client has
acknowledged its settings. So the guard compares what each connection received with what the edge heard of it, and ends

- the newest connections of an address beyond its limit;
- a connection that received more bytes, since the edge last heard of it, than its calls explain; and if all of them
  received too many together, the largest;
- a connection whose headers are far beyond the limit, which only a client sends that acknowledges no settings;
- idle connections, if few are left: first those without any call so far, then those whose last call is oldest.

For one event loop. What the system shows of connections is in accepted.py.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Protocol

from ...settings.security import ConnectionLimits
from ..admission.admission import MessageTooLarge
from ..identity.peers import address_of
from .accepted import Accepted

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
WINDOW_BYTES = 64 * 1024
"""What the core receives of a call before a message is asked for."""
FREE_BYTES = MIB
"""What any connection may receive without a call: the handshake, pings, headers that are too large."""
TOTAL_BYTES = 8 * MIB
"""What all connections may receive together without calls; small amounts don't count."""
HOSTILE_HEADERS = 4
"""Headers of so many times the limit end their connection. The core refuses them if the client knows the limit."""
COPIES = 6
"""The core holds two bytes for each of unfinished headers, and six for a moment when their connection ends."""
IDLE_S = 10.0
"""A connection with a call in the last seconds is not idle."""
_SHORT = 7 / 8
"""Share of --max-connections from which on idle connections are ended."""
_INTERVAL_S, _HASTY_S = 0.1, 0.02
"""Between two looks; after one that ended a connection, since others may come in its place."""
_LAZINESS = 50
"""A look may take one part in so many of a processor's time, or five times as much if it is hasty."""
_TELL_EVERY_S = 60.0
_FEW = 64
"""Connections that have gone are forgotten once so many are remembered."""


class Reason(StrEnum):
    """Why a connection was ended."""

    ADDRESS = "address_limit"
    UNEXPLAINED = "unexplained_bytes"
    HEADERS = "large_headers"
    IDLE = "idle"


class Sockets(Protocol):
    """As AcceptedSockets."""

    def look(self) -> list[Accepted]: ...

    def end(self, connection: Accepted) -> None: ...


@dataclass(slots=True, eq=False)
class ConnectionUse:
    """What the edge heard of one connection. A context: around each of its calls."""

    heard: int = 0
    """Grows with each call, message and end of a call."""
    calls: int = 0
    """In progress."""
    pulls: int = 0
    """Messages that the edge waits for."""
    is_hostile: bool = False
    """Whether the connection is to be ended, for its headers."""

    def __enter__(self) -> None:
        self.heard += 1
        self.calls += 1

    def __exit__(self, *exc_info: object) -> None:
        self.heard += 1
        self.calls -= 1


@dataclass(slots=True, eq=False)
class _Connection:
    socket: Accepted
    use: ConnectionUse
    address: str
    heard_at: float
    """When the edge last heard of it, or when it was first seen."""
    heard: int = 0
    explained_bytes: int = 0
    """What it had received then."""
    is_ended: bool = False

    @property
    def unexplained_bytes(self) -> int:
        return self.socket.received_bytes - self.explained_bytes


@dataclass(slots=True)
class _Told:
    """What the next line of the log says."""

    at: float = -float("inf")
    reasons: Counter[Reason] = field(default_factory=Counter)
    addresses: Counter[str] = field(default_factory=Counter)


class ConnectionGuard:
    """``received_bytes``: of the largest message. ``sockets`` None: the system does not show connections, and the guard
    ends none."""

    def __init__(
        self,
        limits: ConnectionLimits,
        received_bytes: int,
        sockets: Sockets | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._received_bytes = limits, received_bytes
        self._sockets, self._clock = sockets, clock
        self._most_bytes = FREE_BYTES + limits.streams * (WINDOW_BYTES + limits.metadata_bytes)
        """A server that is behind may not have heard yet of as many calls as a connection may have."""
        self._uses: dict[str, ConnectionUse] = {}
        """By peer; where connections aren't seen, there is one for all."""
        self._connections: dict[int, _Connection] = {}
        """By inode, oldest first."""
        self._told = _Told()
        self._freed_bytes = 0
        self._crammed_bytes = 0
        """Of metadata of refused calls: grpcio keeps that of every call in a cycle."""
        self.ended: Counter[str] = Counter(dict.fromkeys(Reason, 0))
        """How many connections were ended, since the start."""

    @property
    def most_metadata_bytes(self) -> int:
        """Of one call."""
        return self._limits.metadata_bytes

    @property
    def num_connections(self) -> int | None:
        """TCP connections at the last look; None where the system doesn't tell. Any thread."""
        return None if self._sockets is None else len(self._connections)

    def refuse_headers(self, peer: str, num_bytes: int) -> MessageTooLarge:
        """What a call ends with whose headers have more than ``most_metadata_bytes``."""
        most = self.most_metadata_bytes
        if num_bytes > HOSTILE_HEADERS * most:
            self.use(peer).is_hostile = True
        self._freed_bytes += COPIES * num_bytes
        self._crammed_bytes += num_bytes
        self._collect(TOTAL_BYTES)
        return MessageTooLarge("", f"the metadata has {num_bytes} bytes, the limit is {most}")

    def take_freed_bytes(self) -> int:
        """What the core freed, since this was last asked, of connections that were ended."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed

    def use(self, peer: str) -> ConnectionUse:
        """Of the connection of a call."""
        if self._sockets is None or not peer.startswith("ip"):
            peer = ""
        use = self._uses.get(peer)
        if use is None:
            use = self._uses[peer] = ConnectionUse()
        return use

    async def run(self) -> None:
        """Looks until cancelled."""
        if self._sockets is None:
            logger.info(
                "this system does not show the connections of a process: --max-connections-per-address is off"
            )
            return
        while True:
            began = time.thread_time()
            was_hasty = self.look()
            took = time.thread_time() - began
            if was_hasty:
                await asyncio.sleep(max(_HASTY_S, took * _LAZINESS / 5))
            else:
                await asyncio.sleep(max(_INTERVAL_S, took * _LAZINESS))

    def look(self) -> bool:
        """Looks at all connections, and ends some. Whether it did."""
        assert self._sockets is not None, "run() checks it"
        now = self._clock()
        try:
            sockets = self._sockets.look()
        except OSError:  # No descriptor is left. The watch of files reports it.
            return False
        self._follow(sockets, now)
        self._collect(MIB)
        before = self.ended.total()
        self._end_hostile()
        self._end_beyond_address()
        self._end_idle(now)
        self._tell(now)
        return self.ended.total() > before

    def _collect(self, most_bytes: int) -> None:
        if self._crammed_bytes > most_bytes:
            self._crammed_bytes = 0
            gc.collect(1)

    def _follow(self, sockets: list[Accepted], now: float) -> None:
        before, self._connections = self._connections, {}
        for socket in sockets:
            known = before.pop(socket.inode, None)
            if known is None:
                use = self.use(socket.peer)
                known = _Connection(socket, use, address_of(socket.peer), now)
            self._connections[socket.inode] = known
            use = known.use
            if use.heard != known.heard:
                known.heard, known.heard_at = use.heard, now
                known.explained_bytes = socket.received_bytes
        if len(self._uses) > 2 * len(self._connections) + _FEW:
            peers = {each.socket.peer for each in self._connections.values()}
            self._uses = {
                peer: use for peer, use in self._uses.items() if use.calls or peer in peers
            }

    def _end_hostile(self) -> None:
        suspects: list[tuple[int, _Connection]] = []
        of_call = WINDOW_BYTES + self._limits.metadata_bytes
        for each in self._connections.values():
            use = each.use
            if each.is_ended:
                continue
            if use.is_hostile:
                self._end(each, Reason.HEADERS)
                continue
            if each.unexplained_bytes <= of_call:
                continue
            explained = use.calls * WINDOW_BYTES + use.pulls * self._received_bytes
            beyond = each.unexplained_bytes - explained
            if beyond > self._most_bytes:
                self._end(each, Reason.UNEXPLAINED)
            elif beyond > of_call:
                suspects.append((beyond, each))
        total = sum(beyond for beyond, _ in suspects)
        for beyond, each in sorted(suspects, key=itemgetter(0), reverse=True):
            if total <= TOTAL_BYTES:
                break
            total -= beyond
            self._end(each, Reason.UNEXPLAINED)

    def _end_beyond_address(self) -> None:
        most = self._limits.most_of_address
        if most is None or len(self._connections) <= most:
            return
        open_of: Counter[str] = Counter()
        for each in self._connections.values():
            if not each.is_ended:
                open_of[each.address] += 1
                if open_of[each.address] > most:
                    self._end(each, Reason.ADDRESS)

    def _end_idle(self, now: float) -> None:
        most = self._limits.connections
        if most is None:
            return
        beyond = -int(_SHORT * most)
        beyond += sum(not each.is_ended for each in self._connections.values())
        if beyond <= 0:
            return
        idle = [
            each
            for each in self._connections.values()
            if not (each.is_ended or each.use.calls) and now - each.heard_at > IDLE_S
        ]
        idle.sort(key=lambda each: (each.heard > 0, each.heard_at))
        for each in idle[:beyond]:
            self._end(each, Reason.IDLE)

    def _end(self, connection: _Connection, reason: Reason) -> None:
        assert self._sockets is not None
        try:
            self._sockets.end(connection.socket)
        except OSError:  # No descriptor is left: the next look tries again.
            return
        connection.is_ended = True
        self.ended[reason] += 1
        self._told.reasons[reason] += 1
        self._told.addresses[connection.address] += 1
        self._freed_bytes += COPIES * max(0, connection.unexplained_bytes)

    def _tell(self, now: float) -> None:
        """One line a minute."""
        told = self._told
        if not told.reasons or now - told.at < _TELL_EVERY_S:
            return
        what = ", ".join(f"{reason} {count}" for reason, count in sorted(told.reasons.items()))
        address, count = told.addresses.most_common(1)[0]
        logger.warning(
            "ended %d connections (%s), %d of them of %s; see --max-connections-per-address in docs/security.md",
            *(told.reasons.total(), what, count, address),
        )
        self._told = _Told(now)
