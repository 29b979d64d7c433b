"""RefusalPace: delays the refusals of callers that are refused too often.

A refused call costs the event loop nearly as much as a small answer. A caller that repeats hundreds of refused calls,
at once or after the time of RetryInfo, would take a large part of the event loop's time from other callers. So beyond
a rate, the server answers the refused calls of such a caller later. The caller's streams are occupied meanwhile, and
it calls less often. A delayed call holds no message and no place.

A data structure for one event loop. It does not use gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from kestrel_engine import clock

RATE = 20.0
"""Refusals a second that a caller gets without a delay."""
AT_ONCE = 40
"""Refusals that a caller gets without a delay after it had none for some time."""
LONGEST_S = 2.0
"""Limit on the delay of a refusal, in seconds. Clients and proxies wait longer for an answer."""
MOST_DELAYED = 1024
"""Limit on the delayed refusals of all callers. A delayed call holds its metadata, and up to 64 KiB of a message that
the server does not read."""
MOST_OF_ONE = 512
"""Limit on the delayed refusals of one caller."""
_MOST_REMEMBERED = 1000


class RefusalPace:
    """Await ``delay`` before each refusal."""

    def __init__(self) -> None:
        self._next_at: dict[str, float] = {}
        """By caller, the time of its next refusal if its refusals had always come at ``RATE``."""
        self._delayed: Counter[str] = Counter()
        """Number of delayed refusals by caller. A caller without any is absent."""
        self.num_delayed = 0
        """Number of refusals that are delayed now."""

    async def delay(self, who: str, left_s: float | None) -> None:
        """Waits until a refused call of ``who`` may be answered.

        ``left_s``: seconds until the call's deadline, None if it has none. The delay takes at most half of them.
        """
        delay_s = self._delay_s(who)
        if left_s is not None:
            delay_s = min(delay_s, left_s / 2)
        if (
            delay_s <= 0
            or self.num_delayed >= MOST_DELAYED
            or self._delayed.get(who, 0) >= MOST_OF_ONE
        ):
            return
        self.num_delayed += 1
        self._delayed[who] += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self.num_delayed -= 1
            self._delayed[who] -= 1
            if not self._delayed[who]:
                del self._delayed[who]

    def _delay_s(self, who: str) -> float:
        """The delay of a refusal in seconds, 0 or less for none. Counts the refusal."""
        now, free_s = clock.now(), AT_ONCE / RATE
        at = max(now, self._next_at.get(who, now))
        # Bounded, so that a caller is not delayed for long after it has stopped to repeat its calls.
        self._next_at[who] = min(at + 1 / RATE, now + free_s + LONGEST_S)
        if len(self._next_at) > _MOST_REMEMBERED:
            self._next_at = {who: at for who, at in self._next_at.items() if at > now}
        return at - now - free_s
