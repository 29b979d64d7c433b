"""MessageRoom: the bytes that requests' messages may hold, given out before a message is asked for.

gRPC can't say how large a message is before it has come, and once it is asked for, all of it comes. So room for the
largest message is reserved first; once the message is there, the reservation shrinks to what it holds. Callers who
wait for room get it in turns, one each; none may hold more than a share, so that one caller never fills the room.

A data structure for one event loop. It knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded

SHARE = 0.75
"""Of the room, for one caller; another one finds the rest free."""


class MessagesFull(EngineOverloaded):
    """The messages of all calls in progress hold as much memory as they may."""


@dataclass(slots=True, eq=False)
class _Waiting:
    num_bytes: int
    granted: asyncio.Future[None]


class MessageRoom:
    """``max_bytes`` None: no limit. ``wait_s``: how long a call waits for room. ``max_waiting``: how many calls may."""

    def __init__(self, max_bytes: int | None, *, wait_s: float, max_waiting: int = 4096) -> None:
        self.max_bytes = max_bytes
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self._held: dict[str, int] = {}
        """By caller; those who hold nothing are absent."""
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By caller, whose turn is next first; none is empty."""
        self.num_waiting = 0
        self.held_bytes = 0
        self.refused = 0
        """How many calls got no room, since the start."""

    def hold(self, who: str) -> Hold:
        """What one call of ``who`` holds: nothing yet. To be closed at its end."""
        return Hold(self, who)

    async def take(self, who: str, num_bytes: int) -> None:
        """Waits for ``num_bytes``. Raises MessagesFull."""
        if who not in self._waiting and self._fits(who, num_bytes):
            self._add(who, num_bytes)
            return
        if self.num_waiting >= self._max_waiting:
            raise self._full(f"{self.num_waiting} calls wait for room")
        entry = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(who, deque()).append(entry)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.granted
        except BaseException as error:
            if entry.granted.done() and not entry.granted.cancelled():
                self.give_back(who, num_bytes)  # It was granted just as the wait ended.
            else:
                self._forget(who, entry)
            if isinstance(error, TimeoutError):
                raise self._full(f"no room came free in {self._wait_s:g} s") from None
            raise

    def give_back(self, who: str, num_bytes: int) -> None:
        """Lets go of so much, and lets those in who wait for it."""
        if not num_bytes:
            return
        self.held_bytes -= num_bytes
        left = self._held[who] - num_bytes
        if left:
            self._held[who] = left
        else:
            del self._held[who]
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        """Grants what fits, one call of each caller a turn."""
        passed_over = 0
        while passed_over < len(self._waiting):
            who, entries = next(iter(self._waiting.items()))
            self._waiting.move_to_end(who)
            if not self._fits(who, entries[0].num_bytes):
                passed_over += 1
                continue
            passed_over = 0
            entry = entries.popleft()
            self.num_waiting -= 1
            if not entries:
                del self._waiting[who]
            self._add(who, entry.num_bytes)
            entry.granted.set_result(None)

    def _forget(self, who: str, entry: _Waiting) -> None:
        entries = self._waiting[who]
        entries.remove(entry)
        self.num_waiting -= 1
        if not entries:
            del self._waiting[who]
        self._serve()  # What came after it may be smaller.

    def _fits(self, who: str, num_bytes: int) -> bool:
        if self.max_bytes is None:
            return True
        if self.held_bytes + num_bytes > self.max_bytes:
            return False
        mine = self._held.get(who, 0)
        # Whoever holds nothing may have one message, however large.
        return not mine or mine + num_bytes <= SHARE * self.max_bytes

    def _add(self, who: str, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._held[who] = self._held.get(who, 0) + num_bytes

    def _full(self, why: str) -> MessagesFull:
        self.refused += 1
        return MessagesFull(
            f"the messages of all calls hold {self.held_bytes} of {self.max_bytes} bytes; {why}"
        )


class Hold:
    """One call's part of a room."""

    __slots__ = ("_room", "_who", "num_bytes")

    def __init__(self, room: MessageRoom, who: str) -> None:
        self._room, self._who = room, who
        self.num_bytes = 0

    async def reserve(self, num_bytes: int) -> None:
        """In place of what it holds now. Raises MessagesFull."""
        self.close()
        await self._room.take(self._who, num_bytes)
        self.num_bytes = num_bytes

    def settle(self, num_bytes: int) -> None:
        """``num_bytes`` of the reservation are enough."""
        assert num_bytes <= self.num_bytes, (num_bytes, self.num_bytes)
        self._room.give_back(self._who, self.num_bytes - num_bytes)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self.settle(0)
