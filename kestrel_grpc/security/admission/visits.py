"""Visits: limits the calls in progress of health, reflection and load reports. One may last as long as a connection."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from .admission import TooManyCalls

MOST_OF_ONE = 256
"""Limit on the calls of one caller. Many clients may watch health behind one address or name."""
MOST_STREAMS = 2048
"""Limit on the streams of all callers. A stream that watches health holds about 40 KiB."""


class Visits:
    """Counts and limits visits on one event loop.

    Unary calls end by themselves, so they are limited only for each caller. Callers that use up the streams then cannot
    prevent the unary calls of probes.
    """

    def __init__(self, most_of_one: int = MOST_OF_ONE, most_streams: int = MOST_STREAMS) -> None:
        self._most_of_one, self._most_streams = most_of_one, most_streams
        self._calls: Counter[tuple[str, bool]] = Counter()
        """Number of calls in progress, by caller and by whether the call is a stream."""
        self.streams = 0

    @property
    def num_calls(self) -> int:
        """Number of calls in progress."""
        return self._calls.total()

    @contextlib.contextmanager
    def admit(self, who: str, *, stream: bool) -> Iterator[None]:
        """A context manager around a call. Raises TooManyCalls."""
        calls = self._calls[who, stream]
        if calls >= self._most_of_one:
            raise TooManyCalls(
                f"{calls} such calls are in progress; the limit is {self._most_of_one}"
            )
        if stream and self.streams >= self._most_streams:
            raise TooManyCalls(
                f"{self.streams} such streams are open; the limit is {self._most_streams}"
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
