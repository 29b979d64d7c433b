"""Shares: each principal's use of the device, and its share of the batch. Owns one account for each principal.

An account's ``used`` is a virtual time: the steps' worth of work that was scheduled for the principal, divided by its
weight. The principal that has used least goes first (start-time fair queuing). A principal that was not waiting starts
at the virtual time of the waiting principals, so that it can't save up a claim. Pure Python; knows no sequence and no
clock."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT_UNIT = 1000
"""Weights are added as integers, so that a sum that is kept over years stays exact."""


@dataclass(slots=True, eq=False)
class Account:
    """One principal that has sequences. ``weight`` is in thousandths."""

    principal: str
    weight: int
    token_cost: float
    """What one row of a decode step adds to ``used``."""
    used: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_urgent: int = 0
    """Running sequences of the best priority."""


class Shares:
    """``enter`` and ``leave`` around a sequence's life; the scheduler moves the counts in between."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._accounts: dict[str, Account] = {}
        self._sequences: dict[str, int] = {}
        self._weights = 0
        self._now = 0.0
        """``used`` of the principal that was served last: the virtual time."""

    @property
    def num_principals(self) -> int:
        """Principals that have sequences."""
        return len(self._accounts)

    def enter(self, principal: str, weight: float) -> Account:
        """The account for one more sequence. ``weight`` counts when the principal has no other."""
        account = self._accounts.get(principal)
        if account is None:
            units = max(1, round(weight * _WEIGHT_UNIT))
            token_cost = _WEIGHT_UNIT / units / self._max_batch_size
            account = self._accounts[principal] = Account(principal, units, token_cost)
            self._sequences[principal] = 0
            self._weights += units
        self._sequences[principal] += 1
        return account

    def leave(self, account: Account) -> None:
        """One sequence less; the last one closes the account."""
        self._sequences[account.principal] -= 1
        if self._sequences[account.principal] == 0:
            del self._sequences[account.principal], self._accounts[account.principal]
            self._weights -= account.weight

    def begin_waiting(self, account: Account) -> None:
        if account.num_waiting == 0:
            account.used = max(account.used, self._now)
        account.num_waiting += 1

    def served(self, account: Account) -> None:
        """A sequence of the account was taken from the queue."""
        self._now = max(self._now, account.used)

    @staticmethod
    def charge(account: Account, steps: float) -> None:
        """Adds work: 1 is all new work that a step may hold beside decoding, or a whole batch's row of tokens."""
        account.used += steps * _WEIGHT_UNIT / account.weight

    def is_over(self, account: Account) -> bool:
        """Whether the principal runs more than its share of the batch while others have sequences."""
        if len(self._accounts) == 1:
            return False
        return account.num_running * self._weights > account.weight * self._max_batch_size

    def has_place_left(self, account: Account) -> bool:
        """Whether one more of its sequences may run within the principal's share of the batch."""
        if account.num_running == 0 or len(self._accounts) == 1:
            return True
        return (account.num_running + 1) * self._weights <= account.weight * self._max_batch_size

    def may_take_from(self, taker: Account, giver: Account) -> bool:
        """Whether a batch place may pass from ``giver`` to ``taker`` by their shares: with one more the taker has at
        most its share, or a single place, and with one less the giver still has its own."""
        places = self._max_batch_size
        left = giver.num_running - 1
        keeps_share = left >= 1 and left * self._weights >= giver.weight * places
        return keeps_share and self.has_place_left(taker)

    def check(self) -> None:
        """Raises AssertionError unless the counts agree."""
        assert self._accounts.keys() == self._sequences.keys()
        assert self._weights == sum(account.weight for account in self._accounts.values())
        for name, account in self._accounts.items():
            assert account.num_waiting >= 0 and account.num_running >= 0
            assert account.num_waiting + account.num_running == self._sequences[name]
