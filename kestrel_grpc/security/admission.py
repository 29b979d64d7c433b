"""Admission: whether a call is taken up, before its message is decoded. Owns what is counted for each principal.

A data structure without I/O, for one event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kestrel_engine import EngineOverloaded, RequestError

from ..settings.security import CallLimits

_MAX_REMEMBERED = 10_000
"""Principals whose buckets are kept: one that is forgotten starts with a full one."""


class RateExceeded(EngineOverloaded):
    """The principal calls more often than it may."""


class TooManyCalls(EngineOverloaded):
    """The principal has as many calls in progress as it may."""


class MessagesFull(EngineOverloaded):
    """The messages of all calls in progress hold as much memory as they may."""


class MessageTooLarge(RequestError):
    """One message is larger than the server takes: it would be the next time too."""


@dataclass(slots=True)
class _Account:
    calls: int = 0
    tokens: float = 0.0
    filled_at: float = 0.0


class Admission:
    """``admit`` around every call."""

    def __init__(
        self,
        limits: CallLimits,
        max_message_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._max_message_bytes, self._clock = limits, max_message_bytes, clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Least recently seen first."""
        self.held_bytes = 0
        self.calls = 0
        self.refused = 0
        """How many calls were told to come back later, since the start."""

    def admit(self, principal: str, num_bytes: int) -> AbstractContextManager[None]:
        """Entering raises RateExceeded, TooManyCalls, MessagesFull, MessageTooLarge; ``num_bytes``: the message's."""
        return _Admitted(self, principal, num_bytes)

    def enter(self, principal: str, num_bytes: int) -> _Account:
        """One more call; ``leave`` at its end. Raises as ``admit``."""
        self.check_size(num_bytes)
        account = self._account(principal)
        try:
            self._check(principal, account, num_bytes)
        except EngineOverloaded:
            self.refused += 1
            raise
        self.held_bytes += num_bytes
        self.calls += 1
        account.calls += 1
        return account

    def leave(self, account: _Account, num_bytes: int) -> None:
        account.calls -= 1
        self.calls -= 1
        self.held_bytes -= num_bytes

    def check_size(self, num_bytes: int) -> None:
        """Raises MessageTooLarge. gRPC counts a compressed message by what came; this is what it became."""
        if num_bytes > self._max_message_bytes:
            raise MessageTooLarge(
                "", f"the message has {num_bytes} bytes, the limit is {self._max_message_bytes}"
            )

    def _check(self, principal: str, account: _Account, num_bytes: int) -> None:
        limits = self._limits
        if limits.calls is not None and account.calls >= limits.calls:
            raise TooManyCalls(
                f"{_of(principal)}{account.calls} calls are in progress, the limit is {limits.calls}"
            )
        if limits.held_bytes is not None and num_bytes > limits.held_bytes:
            raise MessageTooLarge(
                "", f"the message has {num_bytes} bytes, all together may have {limits.held_bytes}"
            )
        if limits.held_bytes is not None and self.held_bytes + num_bytes > limits.held_bytes:
            raise MessagesFull(
                f"the messages of {self.calls} calls hold {self.held_bytes} of {limits.held_bytes} bytes"
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

    __slots__ = ("_account", "_admission", "_num_bytes", "_principal")

    def __init__(self, admission: Admission, principal: str, num_bytes: int) -> None:
        self._admission, self._principal, self._num_bytes = admission, principal, num_bytes

    def __enter__(self) -> None:
        self._account = self._admission.enter(self._principal, self._num_bytes)

    def __exit__(self, *exc_info: object) -> None:
        self._admission.leave(self._account, self._num_bytes)


def _of(principal: str) -> str:
    return f"{principal}: " if principal else ""
