"""Admission: limits the rate and the number of each principal's calls, before a call's message is read.

A data structure without I/O, for one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded, Quota, RequestError, clock

from ...settings.security import CallLimits

_MAX_REMEMBERED = 10_000
"""Number of principals whose token buckets are stored. A principal that was dropped starts with a full bucket."""


class RateExceeded(EngineOverloaded):
    """The principal exceeds its rate of calls."""


class TooManyCalls(EngineOverloaded):
    """The principal has reached its limit on calls in progress."""


class MessageTooLarge(RequestError):
    """A message exceeds the server's limit. A retry would fail too."""


@dataclass(slots=True)
class _Account:
    calls: int = 0
    tokens: float = 0.0
    filled_at: float = 0.0


class Admission:
    """Counts and limits calls. Use ``admit`` as a context manager around every call."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """By principal, the least recently seen first."""
        self.calls = 0
        self.limited = 0
        """Number of calls refused because of a limit since the start."""

    def admit(self, principal: str) -> AbstractContextManager[None]:
        """A context manager around a call. Entering it raises RateExceeded, TooManyCalls."""
        return _Admitted(self, principal)

    def enter(self, principal: str) -> _Account:
        """Counts one more call. Call ``leave`` at its end. Raises RateExceeded, TooManyCalls."""
        account = self._account(principal)
        try:
            self._check(principal, account)
        except EngineOverloaded:
            self.limited += 1
            raise
        self.calls += 1
        account.calls += 1
        return account

    def leave(self, account: _Account) -> None:
        account.calls -= 1
        self.calls -= 1

    def _check(self, principal: str, account: _Account) -> None:
        limits = self._limits
        if limits.calls is not None and account.calls >= limits.calls:
            raise TooManyCalls(
                f"{_prefix(principal)}{account.calls} calls are in progress; the limit is {limits.calls}",
                quota=Quota(principal, "calls in progress", account.calls, limits.calls),
            )
        self._take_token(principal, account)

    def _take_token(self, principal: str, account: _Account) -> None:
        limits, now = self._limits, clock.now()
        if limits.rate is None:
            return
        grown = account.tokens + limits.rate * (now - account.filled_at)
        account.tokens, account.filled_at = min(float(limits.burst), grown), now
        if account.tokens < 1:
            raise RateExceeded(
                f"{_prefix(principal)}the limit is {limits.rate:g} calls per second, {limits.burst} at once",
                retry_after_s=(1 - account.tokens) / limits.rate,
                quota=Quota(principal, "calls at once", limits.burst, limits.burst),
            )
        account.tokens -= 1

    def _account(self, principal: str) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            account = _Account(tokens=self._limits.burst, filled_at=clock.now())
            self._accounts[principal] = account
            if len(self._accounts) > _MAX_REMEMBERED:
                self._drop_idle_account()
        self._accounts.move_to_end(principal)
        return account

    def _drop_idle_account(self) -> None:
        idle = next((name for name, account in self._accounts.items() if account.calls == 0), None)
        if idle is not None:
            del self._accounts[idle]


class _Admitted(AbstractContextManager[None]):
    """The admission of one call. A context manager made from a generator would take three times the CPU time."""

    __slots__ = ("_account", "_admission", "_principal")

    def __init__(self, admission: Admission, principal: str) -> None:
        self._admission, self._principal = admission, principal

    def __enter__(self) -> None:
        self._account = self._admission.enter(self._principal)

    def __exit__(self, *exc_info: object) -> None:
        self._admission.leave(self._account)


def _prefix(principal: str) -> str:
    return f"{principal}: " if principal else ""
