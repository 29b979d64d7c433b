"""Admission and Visits: limit the calls in progress, before a call's message is read.

Data structures without I/O, for one event loop.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded, Quota, RequestError, clock

from ...settings.security import CallLimits

_MAX_REMEMBERED = 10_000
"""Number of principals whose token buckets are stored. A principal that was dropped starts with a full bucket."""


MOST_OF_ONE = 256
"""Limit on the calls of one caller. Many clients may watch health behind one address or name."""
MOST_STREAMS = 2048
"""Limit on the streams of all callers. A stream that watches health holds about 40 KiB."""


class RateExceeded(EngineOverloaded):
    """The principal exceeds its rate of calls."""


class TooManyCalls(EngineOverloaded):
    """The principal has reached its limit on calls in progress."""


class MessageTooLarge(RequestError):
    """A message exceeds the server's limit. A retry would fail too."""

    @classmethod
    def of(cls, num_bytes: int, limit: int, what: str = "the message") -> MessageTooLarge:
        """The error for a message, or another part of a call, of ``num_bytes``."""
        text = f"{what} has {num_bytes} bytes; the limit is {limit}"
        return cls("", text, value=num_bytes, limit=limit)


@dataclass(slots=True)
class _Account(AbstractContextManager[None]):
    """The calls of one principal. A context manager around each of them; one made from a generator would take three
    times the CPU time."""

    calls: int = 0
    tokens: float = 0.0
    filled_at: float = 0.0

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(self, *exc_info: object) -> None:
        self.calls -= 1


class Admission:
    """Counts and limits calls. Use ``admit`` as a context manager around every call."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self.accounts: OrderedDict[str, _Account] = OrderedDict()
        """By principal, the least recently seen first."""
        self.limited = 0
        """Number of calls refused because of a limit since the start."""

    @property
    def calls(self) -> int:
        return sum(account.calls for account in self.accounts.values())

    def admit(self, principal: str) -> AbstractContextManager[None]:
        """Counts a call during the context manager. Raises RateExceeded, TooManyCalls."""
        account = self.accounts.get(principal) or self._begin(principal)
        self.accounts.move_to_end(principal)
        try:
            self._check(principal, account)
        except EngineOverloaded:
            self.limited += 1
            raise
        return account

    def _check(self, principal: str, account: _Account) -> None:
        limits = self._limits
        if limits.calls is not None and account.calls >= limits.calls:
            raise TooManyCalls(
                f"{_prefix(principal)}{account.calls} calls are in progress; the limit is {limits.calls}",
                quota=Quota(principal, "calls in progress", account.calls, limits.calls),
            )
        if limits.rate is not None:
            self._take_token(principal, account, limits.rate)

    def _take_token(self, principal: str, account: _Account, rate: float) -> None:
        limits, now = self._limits, clock.now()
        grown = account.tokens + rate * (now - account.filled_at)
        account.tokens, account.filled_at = min(float(limits.burst), grown), now
        if account.tokens < 1:
            raise RateExceeded(
                f"{_prefix(principal)}the limit is {rate:g} calls per second, {limits.burst} at once",
                retry_after_s=(1 - account.tokens) / rate,
                quota=Quota(principal, "calls at once", limits.burst, limits.burst),
            )
        account.tokens -= 1

    def _begin(self, principal: str) -> _Account:
        """Makes the account of a principal. Beyond the limit, another one without calls is dropped."""
        account = _Account(tokens=self._limits.burst, filled_at=clock.now())
        if len(self.accounts) >= _MAX_REMEMBERED:
            idle = next((name for name, each in self.accounts.items() if each.calls == 0), None)
            if idle is not None:
                del self.accounts[idle]
        self.accounts[principal] = account
        return account


class Visits:
    """Counts and limits visits on one event loop.

    Unary calls end by themselves, so they are limited only for each caller. Callers that use up the streams then cannot
    prevent the unary calls of probes.
    """

    def __init__(self, most_of_one: int = MOST_OF_ONE, most_streams: int = MOST_STREAMS) -> None:
        self.most_of_one, self._most_streams = most_of_one, most_streams
        self._calls: Counter[tuple[str, bool]] = Counter()
        """Number of calls in progress, by caller and by whether the call is a stream."""
        self.streams = 0

    @property
    def num_calls(self) -> int:
        return self._calls.total()

    @contextlib.contextmanager
    def admit(self, who: str, *, stream: bool) -> Iterator[None]:
        """A context manager around a call. Raises TooManyCalls."""
        calls = self._calls[who, stream]
        if calls >= self.most_of_one:
            raise TooManyCalls(
                f"{calls} such calls are in progress; the limit is {self.most_of_one}"
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


def _prefix(principal: str) -> str:
    return f"{principal}: " if principal else ""
