"""MessageRoom: the bytes that requests' messages may hold, given out before a message is asked for.

gRPC can't say how large a message is before it has come, and once it is asked for, all of it comes. So room for the
largest message is reserved first; once the message is there, the reservation shrinks to what it holds. Callers who
wait for room get it in turns, one each; none may hold more than a share, so that one caller never fills the room.

A large message keeps the event loop busy when it is there: gRPC's binding copies it twice, the decoder once more. A
caller whose messages take more than half of the event loop's time is read one message at a time, with pauses as long as
the copies, so that others' calls come between.

A data structure for one event loop. It knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded

SHARE = 0.75
"""Of the room, for one caller; another one finds the rest free."""
_AHEAD_S = 0.25
"""How far a caller may be ahead of half of the event loop's time."""
_HEAVY_S = 2.0
"""How long one who was is read one message at a time."""
_NUM_COPIES = 3
_TRIED_BYTES = 4 * 1024 * 1024
_MOST_REMEMBERED = 1000


class MessagesFull(EngineOverloaded):
    """The messages of all calls in progress hold as much memory as they may."""


@dataclass(slots=True, eq=False)
class _Waiting:
    num_bytes: int
    granted: asyncio.Future[None]


@functools.cache
def copy_s_per_byte() -> float:
    """Seconds that the event loop is busy for a byte of a message: mostly the system's time to provide memory, which
    differs from one machine to another by a factor of 30. Takes a few milliseconds, once."""
    began = time.perf_counter()
    bytes(bytearray(_TRIED_BYTES))
    return (time.perf_counter() - began) / 2 * _NUM_COPIES / _TRIED_BYTES


class MessageRoom:
    """``max_bytes`` None: no limit. ``wait_s``: how long a call waits for room. ``max_waiting``: how many calls may."""

    def __init__(self, max_bytes: int | None, *, wait_s: float, max_waiting: int = 4096) -> None:
        self.max_bytes = max_bytes
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self._held: dict[str, int] = {}
        """By caller; a caller that holds nothing is absent."""
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By caller, whose turn is next first; none is empty."""
        self._reading: Counter[str] = Counter()
        """Messages that are asked for and not there, by caller."""
        self._paid_at: dict[str, float] = {}
        """By caller, when what it had read is made up for."""
        self._heavy_until: dict[str, float] = {}
        """By caller who was too far ahead."""
        self._looking: set[str] = set()
        """Callers for whom a timer runs."""
        self.num_waiting = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        """The most that was held since this was last set."""
        self.refused = 0
        """How many calls got no room, since the start."""

    def hold(self, who: str) -> Hold:
        """What one call of ``who`` holds: nothing yet. To be closed at its end."""
        return Hold(self, who)

    def take_now(self, who: str, num_bytes: int) -> bool:
        """Takes ``num_bytes`` if ``who`` need not wait for them. Whether it did."""
        if who in self._waiting or not self._fits(who, num_bytes):
            return False
        self._add(who, num_bytes)
        return True

    async def take(self, who: str, num_bytes: int) -> None:
        """Waits for ``num_bytes``, after ``take_now`` did not take them. Raises MessagesFull."""
        if self.num_waiting >= self._max_waiting:
            raise self._full(f"{self.num_waiting} calls wait for room")
        entry = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(who, deque()).append(entry)
        self.num_waiting += 1
        self._look_later(who)
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.granted
        except BaseException as error:
            if entry.granted.done() and not entry.granted.cancelled():
                # It was granted just as the wait ended.
                self.end_reading(who, 0)
                self.give_back(who, num_bytes)
            else:
                self._remove(who, entry)
                self._serve()  # What came after it may be smaller.
            if isinstance(error, TimeoutError):
                raise self._full(f"no room came free in {self._wait_s:g} s") from None
            raise

    def end_reading(self, who: str, num_bytes: int) -> None:
        """The message that was asked for is there, with ``num_bytes``, or will not come."""
        self._reading[who] -= 1
        if not self._reading[who]:
            del self._reading[who]
        now = time.monotonic()
        self._paid_at[who] = paid_at = (
            max(now, self._paid_at.get(who, now)) + 2 * num_bytes * copy_s_per_byte()
        )
        if paid_at - now > _AHEAD_S:
            self._heavy_until[who] = paid_at + _HEAVY_S
        if who in self._waiting:
            self._look_later(who)
        if len(self._paid_at) > _MOST_REMEMBERED:
            self._paid_at = {who: at for who, at in self._paid_at.items() if at > now}
            self._heavy_until = {who: at for who, at in self._heavy_until.items() if at > now}

    def give_back(self, who: str, num_bytes: int) -> None:
        """Gives back ``num_bytes``, and grants them to waiting calls."""
        if num_bytes:
            self.held_bytes -= num_bytes
            left = self._held[who] - num_bytes
            if left:
                self._held[who] = left
            else:
                del self._held[who]
        if self._waiting:
            self._serve()

    def _look_later(self, who: str) -> None:
        """Serves ``who``, who waits, when it may be read again, which nothing else tells."""
        now, loop = time.monotonic(), asyncio.get_running_loop()
        times = (self._paid_at.get(who, now) - _AHEAD_S, self._heavy_until.get(who, now))
        later = [at - now for at in times if at > now]
        if later and who not in self._looking:
            self._looking.add(who)
            loop.call_later(min(later), self._look, who)

    def _look(self, who: str) -> None:
        self._looking.discard(who)
        self._serve()
        if who in self._waiting:
            self._look_later(who)

    def _serve(self) -> None:
        """Grants what fits, one call of each caller a turn."""
        passed_over = 0
        while passed_over < len(self._waiting):
            who, entries = next(iter(self._waiting.items()))
            self._waiting.move_to_end(who)
            entry = entries[0]
            # A wait that was given up is still there until its task runs.
            if not entry.granted.cancelled():
                if not self._fits(who, entry.num_bytes):
                    passed_over += 1
                    continue
                self._add(who, entry.num_bytes)
                entry.granted.set_result(None)
            passed_over = 0
            self._remove(who, entry)

    def _remove(self, who: str, entry: _Waiting) -> None:
        entries = self._waiting.get(who)
        if entries is None or entry not in entries:
            return
        entries.remove(entry)
        self.num_waiting -= 1
        if not entries:
            del self._waiting[who]

    def _ahead_s(self, who: str) -> float:
        """Seconds until ``who`` may have another message read; 0 or less if it may."""
        return self._paid_at.get(who, 0.0) - _AHEAD_S - time.monotonic()

    def _fits(self, who: str, num_bytes: int) -> bool:
        if who in self._paid_at and self._ahead_s(who) > 0:
            return False
        if who in self._heavy_until and self._reading.get(who):
            if self._heavy_until[who] > time.monotonic():
                return False
            del self._heavy_until[who]
        if self.max_bytes is None:
            return True
        if self.held_bytes + num_bytes > self.max_bytes:
            return False
        mine = self._held.get(who, 0)
        # A caller that holds nothing may have one message of any size.
        return not mine or mine + num_bytes <= SHARE * self.max_bytes

    def _add(self, who: str, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._held[who] = self._held.get(who, 0) + num_bytes
        self._reading[who] += 1

    def _full(self, why: str) -> MessagesFull:
        self.refused += 1
        return MessagesFull(
            f"the messages of all calls hold {self.held_bytes} of {self.max_bytes} bytes; {why}"
        )


class Hold:
    """One call's part of a room."""

    __slots__ = ("_is_reading", "_room", "_who", "num_bytes")

    def __init__(self, room: MessageRoom, who: str) -> None:
        self._room, self._who = room, who
        self._is_reading = False
        self.num_bytes = 0

    async def reserve(self, num_bytes: int) -> None:
        """For a message that is asked for next, in place of what is held now. Raises MessagesFull."""
        self.close()
        if not self._room.take_now(self._who, num_bytes):
            await self._room.take(self._who, num_bytes)
        self.num_bytes, self._is_reading = num_bytes, True

    def arrived(self, num_bytes: int) -> None:
        """The message is there, and has ``num_bytes``."""
        assert self._is_reading, "nothing was reserved"
        self._is_reading = False
        self._room.end_reading(self._who, num_bytes)

    def settle(self, num_bytes: int) -> None:
        """``num_bytes`` of the reservation are enough."""
        assert num_bytes <= self.num_bytes, (num_bytes, self.num_bytes)
        self._room.give_back(self._who, self.num_bytes - num_bytes)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        if self._is_reading:
            self.arrived(0)
        if self.num_bytes:
            self.settle(0)
