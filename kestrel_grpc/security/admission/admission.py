"""Admission: whether a call is taken up, before its message is asked for. Owns what is counted for each principal.

A data structure without I/O, for one event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded, Quota, RequestError

from ...settings.security import CallLimits

_MAX_REMEMBERED = 10_000
"""Principals whose buckets are kept: one that is forgotten starts with a full one."""


class RateExceeded(EngineOverloaded):
    """The principal calls more often than it may."""


class TooManyCalls(EngineOverloaded):
    """The principal has as many calls in progress as it may."""


class MessageTooLarge(RequestError):
    """One message is larger than the server takes: it would be the next time too."""


@dataclass(slots=True)
class _Account:
    calls: int = 0
    tokens: float = 0.0
    filled_at: float = 0.0


class Admission:
    """``admit`` around every call."""

    def __init__(self, limits: CallLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Least recently seen first."""
        self.calls = 0
        self.refused = 0
        """How many calls were told to come back later, since the start."""

    def admit(self, principal: str) -> AbstractContextManager[None]:
        """Entering raises RateExceeded, TooManyCalls."""
        return _Admitted(self, principal)

    def enter(self, principal: str) -> _Account:
        """One more call; ``leave`` at its end. Raises as ``admit``."""
        account = self._account(principal)
        try:
            self._check(principal, account)
        except EngineOverloaded:
            self.refused += 1
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
                f"{_of(principal)}{account.calls} calls are in progress, the limit is {limits.calls}",
                quota=Quota(principal, "calls in progress", account.calls, limits.calls),
            )
        self._take_token(principal, account)

    def _take_token(self, principal: str, account: _Account) -> None:
        limits, now = self._limits, self._clock()
        if limits.rate is None:
            return
        grown = account.tokens + limits.rate * (now - account.filled_at)
        account.tokens, account.filled_at = min(float(limits.burst), grown), now
        if account.tokens < 1:
            raise RateExceeded(
                f"{_of(principal)}the limit is {limits.rate:g} calls a second, {limits.burst} at once",
                retry_after_s=(1 - account.tokens) / limits.rate,
                quota=Quota(principal, "calls at once", limits.burst, limits.burst),
            )
        account.tokens -= 1

    def _account(self, principal: str) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            account = _Account(tokens=self._limits.burst, filled_at=self._clock())
            self._accounts[principal] = account
            if len(self._accounts) > _MAX_REMEMBERED:
                self._forget_one()
        self._accounts.move_to_end(principal)
        return account

    def _forget_one(self) -> None:
        idle = next((name for name, account in self._accounts.items() if account.calls == 0), None)
        if idle is not None:
            del self._accounts[idle]


class _Admitted(AbstractContextManager[None]):
    """One call's admission. A generator would do the same for three times the CPU, once a call."""

    __slots__ = ("_account", "_admission", "_principal")

    def __init__(self, admission: Admission, principal: str) -> None:
        self._admission, self._principal = admission, principal

    def __enter__(self) -> None:
        self._account = self._admission.enter(self._principal)

    def __exit__(self, *exc_info: object) -> None:
        self._admission.leave(self._account)


def _of(principal: str) -> str:
    return f"{principal}: " if principal else ""
