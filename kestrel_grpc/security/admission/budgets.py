"""Budgets: the tokens that each principal may use in a minute and a day (UTC). Owns what is used and reserved.

A request reserves what it may use at most, before its image is decoded: its prompt, with nothing from a cache, and the
longest answer. At its end it settles what it used. A request that a window's budget does not hold is refused until the
window ends. If a principal has used and reserved nothing of a window, one request of any size may begin; what exceeds
the budget counts against the next windows. So a principal is ahead of its budget by one reservation at most.

Windows follow the wall clock. A clock that is set back gives no tokens back.

A data structure without I/O, for one event loop.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

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
class _Account:
    principal: str
    windows: dict[str, _Window] = field(
        default_factory=lambda: {name: _Window(length_s) for name, length_s in WINDOWS.items()}
    )
    reserved: float = 0.0
    logged: int = -1
    """The begin of the window in which the last refusal in shadow was logged."""


class _Reservation:
    """What one request may use. ``close`` it at its end, after ``settle`` if anything was computed."""

    __slots__ = ("_account", "_budgets", "_cost")

    def __init__(self, budgets: Budgets, account: _Account, cost: float) -> None:
        self._budgets, self._account, self._cost = budgets, account, cost
        account.reserved += cost

    def settle(self, metrics: EngineMetrics) -> None:
        """Counts what the request used."""
        self._budgets.use(self._account, metrics)

    def close(self) -> None:
        """Gives the reserved tokens back. Idempotent."""
        self._account.reserved -= self._cost
        self._cost = 0.0
        if self._account.reserved < 1e-6:  # Sums of floats.
            self._account.reserved = 0.0


class Budgets:
    """``default``: the budget of principals without one of their own, and the weights of all."""

    def __init__(self, default: TokenBudget) -> None:
        self._default = default
        self.accounts: OrderedDict[str, _Account] = OrderedDict()
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
        account.windows["minute"].limit, account.windows["day"].limit = minute, day
        return partial(self._reserve, account)

    def use(self, account: _Account, metrics: EngineMetrics) -> None:
        """Counts what a request of the account used."""
        weights, image = self._default, metrics.image_tokens - metrics.cached_image_tokens
        used = weights.prompt * (metrics.input_tokens - metrics.cached_tokens - image)
        used += weights.image * image + weights.cached * metrics.cached_tokens
        used += weights.output * metrics.output_tokens
        for window in account.windows.values():
            window.renew(clock.wall())
            window.used += used

    def _reserve(self, account: _Account, estimate: TokenEstimate) -> _Reservation:
        # A cached token may count more than others.
        weights, now = self._default, clock.wall()
        cost = (
            max(weights.prompt, weights.cached) * estimate.text + weights.output * estimate.output
        )
        cost += max(weights.image, weights.cached) * estimate.image
        for name, window in account.windows.items():
            window.renew(now)
            if window.lacks(account.reserved, cost):
                self._note(account, name)
                if not self._default.shadow:
                    raise _refusal(account, name, window, cost, now)
                if account.logged != window.began:
                    account.logged = window.began
                    logger.warning("shadow: %s", _refusal(account, name, window, cost, now))
                break
        return _Reservation(self, account, cost)

    def _note(self, account: _Account, window: str) -> None:
        key = account.principal, window
        is_new = key not in self.exceeded and len(self.exceeded) >= _MOST_COUNTED
        self.exceeded[(OTHERS, window) if is_new else key] += 1

    def _account(self, principal: str) -> _Account:
        account = self.accounts.get(principal)
        if account is None:
            account = self.accounts[principal] = _Account(principal)
            if len(self.accounts) > MOST_REMEMBERED:
                idle = next((n for n, each in self.accounts.items() if not each.reserved), None)
                if idle is not None:
                    del self.accounts[idle]
        self.accounts.move_to_end(principal)
        return account

    def state(self) -> dict[str, Any]:
        """What ``restore`` takes. Reserved tokens count as used, so that a killed server gives none back."""
        return {
            account.principal: {
                name: [window.began, window.used + account.reserved]
                for name, window in account.windows.items()
            }
            for account in self.accounts.values()
        }

    def restore(self, state: Any) -> None:
        """Takes the state of an earlier process. Raises ValueError if it is none."""
        if not isinstance(state, dict):
            raise ValueError("holds no object by principal")
        for principal, windows in list(state.items())[-MOST_REMEMBERED:]:
            for name, window in self._account(principal).windows.items():
                found = windows.get(name) if isinstance(windows, dict) else None
                if not (
                    isinstance(found, list) and len(found) == 2 and all(map(_is_amount, found))
                ):
                    raise ValueError(
                        f"{principal[:128]!r}.{name} is not [BEGIN, USED], two numbers from 0 on"
                    )
                window.began, window.used = int(found[0]), float(found[1])


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e18


def _refusal(
    account: _Account, name: str, window: _Window, cost: float, now: float
) -> BudgetExceeded:
    taken, resets_at = window.used + account.reserved, window.resets_at(cost)
    at = datetime.fromtimestamp(resets_at, UTC)
    who = f"{account.principal}: " if account.principal else ""
    return BudgetExceeded(
        f"{who}{taken:.0f} of {window.limit} tokens a {name} are used or reserved, and the request may use {cost:.0f}; "
        f"the budget is renewed at {at:%Y-%m-%dT%H:%M:%SZ}",
        retry_after_s=max(0.0, resets_at - now),
        quota=Quota(account.principal, f"tokens a {name}", round(taken), window.limit),
    )
