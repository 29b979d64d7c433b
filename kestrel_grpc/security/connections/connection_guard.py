"""ConnectionGuard: ends connections, so that no client uses all of them or fills the memory of gRPC's core.

gRPC limits only the number of all connections. It reports a call to the server when the call's headers are complete, so
endless headers stay in the core's memory unnoticed. The core also does not limit headers until the client has
acknowledged its settings. So the guard compares the bytes that each connection has received with the calls and messages
that the edge has handled, and ends

- the newest connections of an address beyond its limit. A connection on which a caller was admitted does not count;
- a connection that has received more bytes since its last call or message than its calls explain; and if all
  connections together have received too many such bytes for some time, the largest of them;
- a connection whose headers are far beyond the limit, which only clients send that do not acknowledge settings;
- idle connections, if few connections are left: first those without any call, then those with the oldest last call.

Runs on one event loop. accepted_connection.py reads the state of connections from the system.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Protocol

from kestrel_engine import clock

from ...settings.security import ConnectionLimits
from ..admission.admission import MessageTooLarge
from ..identity.principal import address_of
from .accepted_connection import AcceptedConnection

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
WINDOW_BYTES = 64 * 1024
"""Bytes that the core receives of a call before a message is read."""
FREE_BYTES = MIB
"""Bytes that any connection may receive without a call: the handshake, pings, headers that are too large."""
TOTAL_BYTES = 8 * MIB
"""Bytes that all connections together may receive without calls. Small amounts do not count. Also the bytes of metadata
between two collections of garbage."""
_FULL_EVERY = 4
"""One collection in so many is full. It takes a few milliseconds, because the objects of the start are frozen."""
HOSTILE_HEADERS = 4
"""Headers of this many times the limit end their connection. The core refuses them if the client knows the limit."""
COPIES = 6
"""Bytes that the core holds for each byte of unfinished headers when their connection ends. Before, it holds two."""
PATIENCE_S = 2.0
"""Seconds that a connection may take to show what it is: its first call, or the calls that explain its bytes. The event
loop of a busy server handles a call that late."""
IDLE_S = 10.0
"""A connection is idle if it had no call for this many seconds."""
_SHORT = 7 / 8
"""Share of --max-connections from which on idle connections are ended."""
_INTERVAL_S, _HASTY_S = 0.1, 0.02
"""Seconds between two looks; and after a look that has ended a connection, because others may take its place."""
_LAZINESS = 50
"""Looks may take one part in this many of a processor's time, or five times as much after an ended connection."""
_LOG_EVERY_S = 60.0
_FEW = 64
"""Closed connections are dropped when this many are stored."""


class Reason(StrEnum):
    """The reason for which a connection was ended."""

    ADDRESS = "address_limit"
    UNEXPLAINED = "unexplained_bytes"
    HEADERS = "large_headers"
    IDLE = "idle"


class Sockets(Protocol):
    """The interface of AcceptedSockets."""

    def look(self) -> list[AcceptedConnection]: ...

    def end(self, connection: AcceptedConnection) -> None: ...


@dataclass(slots=True, eq=False)
class ConnectionUse:
    """The calls and messages of one connection that the edge has handled. A context manager around each call."""

    heard: int = 0
    """Number of events: begins of calls, messages and ends of calls."""
    calls: int = 0
    """Calls in progress."""
    pulls: int = 0
    """Messages that the edge waits for."""
    is_known: bool = False
    """Whether a caller was admitted on the connection."""
    is_hostile: bool = False
    """Whether the guard must end the connection because of its headers."""

    def __enter__(self) -> None:
        self.heard += 1
        self.calls += 1

    def __exit__(self, *exc_info: object) -> None:
        self.heard += 1
        self.calls -= 1


@dataclass(slots=True, eq=False)
class _Connection:
    socket: AcceptedConnection
    use: ConnectionUse
    address: str
    seen_at: float
    """Time of the first look at the connection."""
    heard_at: float
    """Time of the connection's last event, or of the first look at it."""
    heard: int = 0
    explained_bytes: int = 0
    """Bytes that the connection had received at ``heard_at``."""
    is_ended: bool = False

    @property
    def unexplained_bytes(self) -> int:
        return self.socket.received_bytes - self.explained_bytes


@dataclass(slots=True)
class _Report:
    """The ended connections that the next line of the log reports. ``logged_at``: time of the previous line."""

    logged_at: float = -float("inf")
    reasons: Counter[Reason] = field(default_factory=Counter)
    addresses: Counter[str] = field(default_factory=Counter)


class ConnectionGuard:
    """Observes and ends connections. ``received_bytes``: size of the largest message. ``sockets``: None if the system
    does not support observing connections; the guard then ends none."""

    def __init__(
        self, limits: ConnectionLimits, received_bytes: int, sockets: Sockets | None
    ) -> None:
        self._limits, self._received_bytes = limits, received_bytes
        self._sockets = sockets
        self._most_bytes = FREE_BYTES + limits.streams * (WINDOW_BYTES + limits.metadata_bytes)
        """Limit on unexplained bytes. A busy server may not know yet of as many calls as a connection may have."""
        self.uses: dict[str, ConnectionUse] = {}
        """By peer; if connections cannot be observed, there is one for all."""
        self.connections: dict[int, _Connection] = {}
        """By inode, the oldest first."""
        self._report = _Report()
        self._freed_bytes = 0
        self._metadata_bytes, self._num_collected = 0, 0
        """Bytes of the metadata of calls since the last collection, and the number of collections."""
        self.ended: Counter[str] = Counter(dict.fromkeys(Reason, 0))
        """Number of connections ended since the start, by reason."""

    @property
    def num_connections(self) -> int | None:
        """Number of TCP connections at the last look; None if they cannot be observed. Any thread may read it."""
        return None if self._sockets is None else len(self.connections)

    def note_metadata(self, num_bytes: int) -> bool:
        """Counts the metadata of a call. Returns whether it is within the limit. Collects garbage after every
        TOTAL_BYTES: grpcio keeps the metadata of each call in a reference cycle, and Python's own collections count
        objects, not bytes. Calls in progress outlive a collection of young objects, so every few collections include
        the old ones."""
        self._metadata_bytes += num_bytes
        if self._metadata_bytes > TOTAL_BYTES:
            self._metadata_bytes = 0
            self._num_collected += 1
            gc.collect(1 if self._num_collected % _FULL_EVERY else 2)
        return num_bytes <= self._limits.metadata_bytes

    def refuse_headers(self, peer: str, num_bytes: int) -> MessageTooLarge:
        """The error for a call whose metadata has ``num_bytes``, which is more than the limit."""
        most = self._limits.metadata_bytes
        if num_bytes > HOSTILE_HEADERS * most:
            self.use(peer).is_hostile = True
        self._freed_bytes += COPIES * num_bytes
        return MessageTooLarge.of(num_bytes, most, "the metadata")

    def take_freed_bytes(self) -> int:
        """Bytes that the core has freed for ended connections since the last call of this method."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed

    def use(self, peer: str) -> ConnectionUse:
        if self._sockets is None or not peer.startswith("ip"):
            peer = ""
        use = self.uses.get(peer)
        if use is None:
            use = self.uses[peer] = ConnectionUse()
        return use

    async def run(self) -> None:
        """Looks at all connections again and again until it is cancelled."""
        if self._sockets is None:
            logger.info(
                "--max-connections-per-address is off: this system does not support observing connections"
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
        """Looks at all connections and ends some. Returns whether it has ended any."""
        assert self._sockets is not None, "run() checks it"
        now = clock.now()
        try:
            sockets = self._sockets.look()
        except OSError:  # No descriptor is free. FileWatch reports it.
            return False
        self._follow(sockets, now)
        before = self.ended.total()
        self._end_hostile(now)
        self._end_beyond_address(now)
        self._end_idle(now)
        self._log_ended(now)
        return self.ended.total() > before

    def _follow(self, sockets: list[AcceptedConnection], now: float) -> None:
        before, self.connections = self.connections, {}
        for socket in sockets:
            known = before.pop(socket.inode, None)
            if known is None:
                use = self.use(socket.peer)
                known = _Connection(socket, use, address_of(socket.peer), now, now)
            self.connections[socket.inode] = known
            use = known.use
            if use.heard != known.heard:
                known.heard, known.heard_at = use.heard, now
                known.explained_bytes = socket.received_bytes
        for gone in before.values():
            gone.use.is_hostile = gone.use.is_known = False  # The next may have the same port.
        if len(self.uses) > 2 * len(self.connections) + _FEW:
            peers = {each.socket.peer for each in self.connections.values()}
            self.uses = {peer: use for peer, use in self.uses.items() if use.calls or peer in peers}

    def _end_hostile(self, now: float) -> None:
        suspects: list[tuple[int, _Connection]] = []
        of_call = WINDOW_BYTES + self._limits.metadata_bytes
        for each in self.connections.values():
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
                continue
            # A stranger gets no time for it: headers without end come fast.
            has_had_time = not use.is_known or now - each.heard_at > PATIENCE_S
            if beyond > of_call and has_had_time:
                suspects.append((beyond, each))
        total = sum(beyond for beyond, _ in suspects)
        for beyond, each in sorted(suspects, key=itemgetter(0), reverse=True):
            if total <= TOTAL_BYTES:
                break
            total -= beyond
            self._end(each, Reason.UNEXPLAINED)

    def _end_beyond_address(self, now: float) -> None:
        most = self._limits.most_of_address
        if most is None or len(self.connections) <= most:
            return
        open_of: Counter[str] = Counter()
        for each in self.connections.values():
            is_young = now - each.seen_at < PATIENCE_S
            if not (each.is_ended or each.use.is_known or is_young):
                open_of[each.address] += 1
                if open_of[each.address] > most:
                    self._end(each, Reason.ADDRESS)

    def _end_idle(self, now: float) -> None:
        most = self._limits.connections
        if most is None:
            return
        beyond = -int(_SHORT * most)
        beyond += sum(not each.is_ended for each in self.connections.values())
        if beyond <= 0:
            return
        idle = [
            each
            for each in self.connections.values()
            if not (each.is_ended or each.use.calls) and now - each.heard_at > IDLE_S
        ]
        idle.sort(key=lambda each: (each.heard > 0, each.heard_at))
        for each in idle[:beyond]:
            self._end(each, Reason.IDLE)

    def _end(self, connection: _Connection, reason: Reason) -> None:
        assert self._sockets is not None
        try:
            self._sockets.end(connection.socket)
        except OSError:  # No descriptor is free. The next look tries again.
            return
        connection.is_ended = True
        self.ended[reason] += 1
        self._report.reasons[reason] += 1
        self._report.addresses[connection.address] += 1
        self._freed_bytes += COPIES * max(0, connection.unexplained_bytes)

    def _log_ended(self, now: float) -> None:
        """Logs the ended connections, at most one line a minute."""
        report = self._report
        if not report.reasons or now - report.logged_at < _LOG_EVERY_S:
            return
        what = ", ".join(f"{reason} {count}" for reason, count in sorted(report.reasons.items()))
        address, count = report.addresses.most_common(1)[0]
        logger.warning(
            "ended %d connections (%s), %d of them from %s; see --max-connections-per-address in docs/run/security.md",
            *(report.reasons.total(), what, count, address),
        )
        self._report = _Report(now)
