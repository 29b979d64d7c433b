"""Visits: calls of health and reflection in progress, by caller. Such a call may last as long as its connection."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from .admission import TooManyCalls

MOST_OF_ONE = 256
"""Calls of one caller: as many clients watch health behind one address or name."""
MOST_STREAMS = 2048
"""Streams of all callers. A watched stream holds about 40 KiB."""


class Visits:
    """For one event loop. Calls with one answer end by themselves: they are bounded for each caller only, so that
    strangers who fill the streams don't keep probes out."""

    def __init__(self, most_of_one: int = MOST_OF_ONE, most_streams: int = MOST_STREAMS) -> None:
        self._most_of_one, self._most_streams = most_of_one, most_streams
        self._calls: Counter[tuple[str, bool]] = Counter()
        """By caller and whether the call is a stream."""
        self.streams = 0

    @property
    def num_calls(self) -> int:
        """In progress."""
        return self._calls.total()

    @contextlib.contextmanager
    def admit(self, who: str, *, stream: bool) -> Iterator[None]:
        """Around a call. Raises TooManyCalls."""
        mine = self._calls[who, stream]
        if mine >= self._most_of_one:
            raise TooManyCalls(
                f"{mine} such calls are in progress, the limit is {self._most_of_one}"
            )
        if stream and self.streams >= self._most_streams:
            raise TooManyCalls(
                f"{self.streams} such streams are open, the limit is {self._most_streams}"
            )
        self._calls[who, stream] += 1
        self.streams += stream
        try:
            yield
        finally:
            self.streams -= stream
            self._calls[who, stream] -= 1
            if not self._calls[who, stream]:
                del self._calls[who, stream]
