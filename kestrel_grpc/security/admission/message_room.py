"""MessageRoom: limits the memory of request messages. A call reserves memory before it reads a message.

gRPC does not report the size of a message before the message has arrived, and a read receives all of it. So a call
reserves memory for the largest message first. When the message has arrived, the reservation shrinks to its size.
Callers that wait for memory get it in turns, one call each. Each caller is limited to a share.

A large message keeps the event loop busy when it arrives: gRPC's binding copies it twice, the decoder once more. If a
caller's messages take more than half of the event loop's time, its messages are read one at a time, with pauses as long
as the copies, so that other callers' calls run in between.

A data structure for one event loop. It does not use gRPC.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded, clock

COPIES = 2
"""Number of copies of a message's bytes in memory during its call: the message, and the image in it."""

ADAPTED_COPIES = 3
"""For a message that an adapter translates into one of kestrel.v1, which has the image once more."""
SHARE = 0.75
"""The share of the room that one caller may hold. The rest stays free for other callers."""
_AHEAD_S = 0.25
"""Seconds of copying that a caller may be ahead of half of the event loop's time."""
_HEAVY_S = 2.0
"""Seconds for which the messages of a caller that was further ahead are read one at a time."""
_NUM_COPIES = 3
_TRIED_BYTES = 4 * 1024 * 1024
_MOST_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits in bytes."""

    largest: int
    """Limit on one decompressed message."""
    held: int | None
    """Limit on all messages in memory together; None for no limit."""

    @property
    def received(self) -> int:
        """Limit for gRPC itself. It is larger than ``largest``, so that this server refuses slightly larger messages
        with a reason, which gRPC's own refusal lacks."""
        return self.largest + self.largest // 4

    @property
    def reserved(self) -> int:
        """Bytes to reserve before a message of kestrel.v1 is read."""
        return self.reserved_for(COPIES)

    def reserved_for(self, copies: int) -> int:
        """Bytes to reserve before a message is read of which ``copies`` are in memory during its call."""
        most = copies * self.largest
        return most if self.held is None else min(most, self.held)


class MessagesFull(EngineOverloaded):
    """The messages of all calls in progress have reached their memory limit."""


@dataclass(slots=True, eq=False)
class _Waiting:
    num_bytes: int
    granted: asyncio.Future[None]


@functools.cache
def copy_s_per_byte() -> float:
    """Seconds that the event loop is busy for each byte of a message, measured on this machine.

    This is mostly the system's time to provide memory, which differs between machines by a factor of 30. The first call
    takes a few milliseconds.
    """
    began = time.thread_time()
    bytes(bytearray(_TRIED_BYTES))
    return (time.thread_time() - began) / 2 * _NUM_COPIES / _TRIED_BYTES


class MessageRoom:
    """The memory of messages. ``max_bytes``: the limit, None for none. ``wait_s``: seconds that a call waits for
    memory. ``max_waiting``: limit on the calls that wait."""

    def __init__(self, max_bytes: int | None, *, wait_s: float, max_waiting: int = 4096) -> None:
        self.max_bytes = max_bytes
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self.held: dict[str, int] = {}
        """Held bytes by caller. A caller that holds none is absent."""
        self.waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Waiting calls by caller, in the order of turns. No queue is empty."""
        self.reading: dict[str, int] = {}
        """Number of messages that are being read, by caller that has any."""
        self._paid_at: dict[str, float] = {}
        """By caller, the time when the pauses for its messages are over."""
        self._heavy_until: dict[str, float] = {}
        """By caller that was too far ahead, the time until which its messages are read one at a time."""
        self._timed: set[str] = set()
        """Callers that have a timer."""
        self.num_waiting = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        """The largest value of ``held_bytes`` since this was last set."""
        self.limited = 0
        """Number of calls since the start that got no memory."""

    def reserve_now(self, who: str, num_bytes: int) -> bool:
        """Reserves ``num_bytes`` if ``who`` need not wait for them. Returns whether it has reserved them."""
        if who in self.waiting or not self._fits(who, num_bytes):
            return False
        self._add(who, num_bytes)
        return True

    def reserve_spare(self, who: str, num_bytes: int) -> bool:
        """Reserves ``num_bytes`` for a message that may come late, if no call waits and half of the room stays free.
        Returns whether it has reserved them."""
        if self.num_waiting:
            return False
        if self.max_bytes is not None and 2 * (self.held_bytes + num_bytes) > self.max_bytes:
            return False
        return self.reserve_now(who, num_bytes)

    async def reserve(self, who: str, num_bytes: int) -> None:
        """Waits for ``num_bytes`` and reserves them, if ``reserve_now`` returned False. Raises MessagesFull."""
        if self.num_waiting >= self._max_waiting:
            raise self._full(f"{self.num_waiting} calls wait for room")
        entry = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self.waiting.setdefault(who, deque()).append(entry)
        self.num_waiting += 1
        self._schedule(who)
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.granted
        except BaseException as error:
            if entry.granted.done() and not entry.granted.cancelled():
                # The memory was granted at the moment when the wait ended.
                self.end_reading(who, 0)
                self.give_back(who, num_bytes)
            else:
                self._remove(who, entry)
                self._serve()  # The next call may need less memory.
            if isinstance(error, TimeoutError):
                raise self._full(f"no room became free in {self._wait_s:g} s") from None
            raise

    def end_reading(self, who: str, num_bytes: int) -> None:
        """A message has arrived with ``num_bytes``, or will not arrive."""
        left = self.reading.pop(who) - 1
        if left:
            self.reading[who] = left
        now = clock.now()
        self._paid_at[who] = paid_at = (
            max(now, self._paid_at.get(who, now)) + 2 * num_bytes * copy_s_per_byte()
        )
        if paid_at - now > _AHEAD_S:
            self._heavy_until[who] = paid_at + _HEAVY_S
        if who in self.waiting:
            self._schedule(who)
        if len(self._paid_at) > _MOST_REMEMBERED:
            self._paid_at = {who: at for who, at in self._paid_at.items() if at > now}
            self._heavy_until = {who: at for who, at in self._heavy_until.items() if at > now}

    def give_back(self, who: str, num_bytes: int) -> None:
        """Frees ``num_bytes``, and grants them to waiting calls."""
        if num_bytes:
            self.held_bytes -= num_bytes
            left = self.held[who] - num_bytes
            if left:
                self.held[who] = left
            else:
                del self.held[who]
        if self.waiting:
            self._serve()

    def _schedule(self, who: str) -> None:
        """Sets a timer for the end of the pauses of ``who``, which waits."""
        now, loop = clock.now(), asyncio.get_running_loop()
        times = (self._paid_at.get(who, now) - _AHEAD_S, self._heavy_until.get(who, now))
        later = [at - now for at in times if at > now]
        if later and who not in self._timed:
            self._timed.add(who)
            loop.call_later(min(later), self._end_pause, who)

    def _end_pause(self, who: str) -> None:
        self._timed.discard(who)
        self._serve()
        if who in self.waiting:
            self._schedule(who)

    def _serve(self) -> None:
        """Grants memory to the waiting calls that fit, one call of each caller per turn."""
        passed_over = 0
        while passed_over < len(self.waiting):
            who, entries = next(iter(self.waiting.items()))
            self.waiting.move_to_end(who)
            entry = entries[0]
            # A cancelled wait stays in the queue until its task runs.
            if not entry.granted.cancelled():
                if not self._fits(who, entry.num_bytes):
                    passed_over += 1
                    continue
                self._add(who, entry.num_bytes)
                entry.granted.set_result(None)
            passed_over = 0
            self._remove(who, entry)

    def _remove(self, who: str, entry: _Waiting) -> None:
        entries = self.waiting.get(who)
        if entries is None or entry not in entries:
            return
        entries.remove(entry)
        self.num_waiting -= 1
        if not entries:
            del self.waiting[who]

    def _fits(self, who: str, num_bytes: int) -> bool:
        if self._paid_at.get(who, 0.0) - _AHEAD_S > clock.now():
            return False
        if who in self._heavy_until and self.reading.get(who):
            if self._heavy_until[who] > clock.now():
                return False
            del self._heavy_until[who]
        if self.max_bytes is None:
            return True
        if self.held_bytes + num_bytes > self.max_bytes:
            return False
        held = self.held.get(who, 0)
        # A caller that holds nothing may reserve one message of any size.
        return not held or held + num_bytes <= SHARE * self.max_bytes

    def _add(self, who: str, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes
        self.held[who] = self.held.get(who, 0) + num_bytes
        self.reading[who] = self.reading.get(who, 0) + 1

    def _full(self, why: str) -> MessagesFull:
        self.limited += 1
        return MessagesFull(
            f"the messages of all calls hold {self.held_bytes} of {self.max_bytes} bytes; {why}"
        )


class Hold:
    """The part of ``room`` that one call of ``who`` holds, empty at first. Close it at the end of the call."""

    __slots__ = ("_is_reading", "_room", "_who", "num_bytes")

    def __init__(self, room: MessageRoom, who: str) -> None:
        self._room, self._who = room, who
        self._is_reading = False
        self.num_bytes = 0

    async def reserve(self, num_bytes: int) -> None:
        """Reserves memory for the next message, in place of the memory that is held now: ``num_bytes``, or the whole
        room if that is less. Raises MessagesFull."""
        if self.num_bytes:
            self.close()
        most = self._room.max_bytes
        if most is not None and num_bytes > most:
            num_bytes = most
        if not self._room.reserve_now(self._who, num_bytes):
            await self._room.reserve(self._who, num_bytes)
        self.num_bytes, self._is_reading = num_bytes, True

    def reserve_spare(self, num_bytes: int) -> bool:
        """As ``reserve``, for a message that may come late. Returns whether the memory was free."""
        self.close()
        if not self._room.reserve_spare(self._who, num_bytes):
            return False
        self.num_bytes, self._is_reading = num_bytes, True
        return True

    def arrived(self, num_bytes: int) -> None:
        """The message has arrived and has ``num_bytes``."""
        assert self._is_reading, "nothing was reserved"
        self._is_reading = False
        self._room.end_reading(self._who, num_bytes)

    def settle(self, num_bytes: int) -> None:
        """Shrinks the reservation to ``num_bytes``."""
        assert num_bytes <= self.num_bytes, (num_bytes, self.num_bytes)
        self._room.give_back(self._who, self.num_bytes - num_bytes)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Frees all memory of the call. Idempotent."""
        if self._is_reading:
            self.arrived(0)
        if self.num_bytes:
            self._room.give_back(self._who, self.num_bytes)
            self.num_bytes = 0
