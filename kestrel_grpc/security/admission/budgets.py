"""Budgets: the tokens that each principal may use in a minute and a day (UTC). Owns what is used and reserved.

A request reserves what it may use at most, before its image is decoded: its prompt, with nothing from a cache, and the
longest answer. At its end it settles what it used. A request that a window's budget does not hold is refused until the
window ends. If a principal has used and reserved nothing of a window, one request of any size may begin; what exceeds
the budget counts against the next windows. So a principal is ahead of its budget by one reservation at most.

Windows follow the wall clock. A clock that is set back gives no tokens back.

A data structure for one event loop. Without a ledger it does no I/O.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from kestrel_engine import EngineMetrics, EngineOverloaded, Quota, TokenEstimate, clock

from ...settings.budgets import TokenBudget
from ..identity.principal import Principal

logger = logging.getLogger(__name__)

WINDOWS = {"minute": 60, "day": 86_400}
MOST_REMEMBERED = 10_000
"""Number of principals whose use is stored. A principal that was dropped starts with its whole budget."""
_MOST_COUNTED, OTHERS = 100, "other"


class BudgetExceeded(EngineOverloaded):
    """The request may use more tokens than are left of its principal's budget."""


@dataclass(slots=True)
class _Window:
    """Tokens that were used since ``began``, and what earlier windows used beyond their budget."""

    length_s: int
    limit: int = 0
    began: int = 0
    used: float = 0.0

    def renew(self, now: float) -> None:
        began = int(now // self.length_s) * self.length_s
        if began > self.began:
            passed = (began - self.began) // self.length_s
            self.used = max(0.0, self.used - passed * self.limit)
        self.began = began

    def lacks(self, reserved: float, cost: float) -> bool:
        taken = self.used + reserved
        return bool(self.limit) and taken > 0 and taken + cost > self.limit

    def resets_at(self, cost: float) -> float:
        """The end of the window after which the budget holds ``cost``, if all that is reserved is given back."""
        missing = self.used + min(cost, self.limit) - self.limit
        return self.began + self.length_s * max(1, math.ceil(missing / self.limit))


@dataclass(slots=True)
class Account:
    """What a principal has used and reserved."""

    principal: str
    windows: dict[str, _Window] = field(
        default_factory=lambda: {name: _Window(length_s) for name, length_s in WINDOWS.items()}
    )
    reserved: float = 0.0
    """By requests of this process."""
    elsewhere: float = 0.0
    """What other processes have reserved."""
    counted: float = 0.0
    """All that this process has counted, and, as the next one, how much of it the ledger has."""
    stored: float = 0.0
    logged: int = -1
    """The begin of the window in which the last refusal in shadow was logged."""


class Ledger(Protocol):
    """What several processes know of accounts."""

    def turn(self, account: Account) -> AbstractContextManager[None]: ...


_ALONE = nullcontext()


class _Reservation:
    """What one request may use. ``close`` it at its end, after ``settle`` if anything was computed."""

    __slots__ = ("_account", "_budgets", "_cost")

    def __init__(self, budgets: Budgets, account: Account, cost: float) -> None:
        self._budgets, self._account, self._cost = budgets, account, cost
        account.reserved += cost

    def settle(self, metrics: EngineMetrics) -> None:
        """Counts what the request used."""
        self._budgets.use(self._account, metrics)

    def close(self) -> None:
        """Gives the reserved tokens back. Idempotent."""
        if not self._cost:
            return
        with self._budgets.turn(self._account):
            self._account.reserved -= self._cost
            self._cost = 0.0
            if self._account.reserved < 1e-6:  # Sums of floats.
                self._account.reserved = 0.0


class Budgets:
    """``default``: the budget of principals without one of their own, and the weights of all."""

    def __init__(self, default: TokenBudget) -> None:
        self._default = default
        self.ledger: Ledger | None = None
        """What this process shares with others; None if it counts alone."""
        self.accounts: OrderedDict[str, Account] = OrderedDict()
        """By principal, the least recently seen first."""
        self.exceeded: Counter[tuple[str, str]] = Counter()
        """Requests that were refused, or would have been, by principal and window."""

    def of(self, principal: Principal) -> Callable[[TokenEstimate], _Reservation] | None:
        """What reserves tokens of a principal for a request, and raises BudgetExceeded; None without a budget."""
        default = self._default
        minute = default.minute if principal.minute_tokens is None else principal.minute_tokens
        day = default.day if principal.day_tokens is None else principal.day_tokens
        if not (minute or day):
            return None
        account = self._account(principal.name)
        return partial(self._reserve, account, {"minute": minute, "day": day})

    def use(self, account: Account, metrics: EngineMetrics) -> None:
        weights, image = self._default, metrics.image_tokens - metrics.cached_image_tokens
        used = weights.prompt * (metrics.input_tokens - metrics.cached_tokens - image)
        used += weights.image * image + weights.cached * metrics.cached_tokens
        used += weights.output * metrics.output_tokens
        with self.turn(account):
            account.counted += used
            for window in account.windows.values():
                window.renew(clock.wall())
                window.used += used

    def turn(self, account: Account) -> AbstractContextManager[None]:
        """Around a change of an account that other processes have too."""
        return _ALONE if self.ledger is None else self.ledger.turn(account)

    def _reserve(
        self, account: Account, limits: dict[str, int], estimate: TokenEstimate
    ) -> _Reservation:
        # Calls of one principal may differ: a batch has the limits of its beginning.
        for name, limit in limits.items():
            account.windows[name].limit = limit
        with self.turn(account):
            return self._reserve_now(account, estimate)

    def _reserve_now(self, account: Account, estimate: TokenEstimate) -> _Reservation:
        # A cached token may count more than others.
        weights, now = self._default, clock.wall()
        cost = (
            max(weights.prompt, weights.cached) * estimate.text + weights.output * estimate.output
        )
        cost += max(weights.image, weights.cached) * estimate.image
        for name, window in account.windows.items():
            window.renew(now)
            if window.lacks(account.reserved + account.elsewhere, cost):
                self._note(account, name)
                if not self._default.shadow:
                    raise _refusal(account, name, window, cost, now)
                if account.logged != window.began:
                    account.logged = window.began
                    logger.warning("shadow: %s", _refusal(account, name, window, cost, now))
                break
        return _Reservation(self, account, cost)

    def _note(self, account: Account, window: str) -> None:
        key = account.principal, window
        is_new = key not in self.exceeded and len(self.exceeded) >= _MOST_COUNTED
        self.exceeded[(OTHERS, window) if is_new else key] += 1

    def _account(self, principal: str) -> Account:
        account = self.accounts.get(principal)
        if account is None:
            account = self.accounts[principal] = Account(principal)
            if len(self.accounts) > MOST_REMEMBERED:
                idle = next((n for n, each in self.accounts.items() if not each.reserved), None)
                if idle is not None:
                    del self.accounts[idle]
        self.accounts.move_to_end(principal)
        return account


def _refusal(
    account: Account, name: str, window: _Window, cost: float, now: float
) -> BudgetExceeded:
    taken = window.used + account.reserved + account.elsewhere
    resets_at = window.resets_at(cost)
    at = datetime.fromtimestamp(resets_at, UTC)
    who = f"{account.principal}: " if account.principal else ""
    return BudgetExceeded(
        f"{who}{taken:.0f} of {window.limit} tokens a {name} are used or reserved, and the request may use {cost:.0f}; "
        f"the budget is renewed at {at:%Y-%m-%dT%H:%M:%SZ}",
        retry_after_s=max(0.0, resets_at - now),
        quota=Quota(account.principal, f"tokens a {name}", round(taken), window.limit),
    )
