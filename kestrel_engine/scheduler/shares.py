"""Shares: each principal's use of the device, and its share of the batch's places.

An account's ``used`` is a virtual time: the steps' worth of work that was scheduled for the principal, divided by its
weight. The principal that has used least goes first (start-time fair queuing). A principal that was not waiting starts
at the virtual time of the waiting principals, so that it can't save up a claim.
"""

from __future__ import annotations

from ..fair_shares import WEIGHT_UNIT, FairShares, Member


class Account(Member):
    """One principal that has sequences. It holds a place for each sequence that runs."""

    __slots__ = ("num_urgent", "num_waiting", "token_cost", "used")

    def __init__(self, principal: str, weight: float, max_batch_size: int) -> None:
        super().__init__(principal, weight)
        self.token_cost = WEIGHT_UNIT / self.weight / max_batch_size
        """What one row of a decode step adds to ``used``."""
        self.used = 0.0
        self.num_waiting = 0
        self.num_urgent = 0
        """Running sequences of the best priority."""


class Shares(FairShares[Account]):
    """``begin`` and ``leave`` around a sequence's life; the scheduler moves the counts in between."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self._now = 0.0
        """``used`` of the principal that was served last: the virtual time."""

    def begin(self, principal: str, weight: float) -> Account:
        """The account for one more sequence. ``weight`` counts when the principal has no other."""
        account = self.members.get(principal) or Account(principal, weight, self.bound)
        self.enter(account)
        return account

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
        account.used += steps * WEIGHT_UNIT / account.weight

    def has_place_left(self, account: Account) -> bool:
        """Whether one more of its sequences may run within the principal's share of the batch."""
        return account.held == 0 or len(self.members) == 1 or not self.exceeds(account, 1)

    def may_take_from(self, taker: Account, giver: Account) -> bool:
        """Whether a batch place may pass from ``giver`` to ``taker`` by their shares: with one more the taker has at
        most its share, or a single place, and with one less the giver still has its own."""
        left = giver.held - 1
        keeps_share = left >= 1 and left * self.weights_with(giver) >= giver.weight * self.bound
        return keeps_share and self.has_place_left(taker)

    def check(self) -> None:
        super().check()
        for account in self.members.values():
            assert account.num_waiting >= 0 and account.num_waiting + account.held == account.uses
