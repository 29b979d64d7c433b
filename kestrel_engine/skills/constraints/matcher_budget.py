"""MatcherBudget: how much processor time a request and a principal may use to follow constraints. Owns what principals
have used.

An ordinary mask takes 10 to 500 microseconds, so an ordinary answer uses some 50 ms. The time of quick matchers counts
for no principal.
"""

from __future__ import annotations

from typing import Protocol

from ... import clock
from ...errors import ConstraintsCostly, FieldPath, InvalidRequest, KestrelError, Quota, path_text

REQUEST_S = 2.0
"""Seconds that a request may use."""
PRINCIPAL_S = 10.0
"""Seconds that slow matchers of a principal may use at once."""
REFILL = 0.2
"""Seconds that a principal gets back in each second."""
_MOST_REMEMBERED = 1024


class Spender(Protocol):
    """A matcher. ``field``: the setting that its errors name. ``seconds``: processor time that it has used.
    ``is_quick``: its masks take an ordinary time."""

    principal: str
    field: FieldPath
    seconds: float

    @property
    def is_quick(self) -> bool: ...


class MatcherBudget:
    """For one thread at a time."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        """By principal: seconds that it has not got back yet, and the instant of that."""

    def spend(self, matcher: Spender, seconds: float) -> KestrelError | None:
        """Notes that ``matcher`` used ``seconds`` more. Returns the error of its request if that is too much."""
        if matcher.seconds > REQUEST_S:
            return InvalidRequest(
                matcher.field,
                f"is too complex for this text: following it took {matcher.seconds:.1f} s of processor time, the limit "
                f"is {REQUEST_S:g} s; use a simpler constraint (an ambiguous grammar is slow), or lower max_tokens",
            )
        if matcher.is_quick:
            return None
        used = self._owed(matcher.principal) + seconds
        self._used[matcher.principal] = used, clock.now()
        if used <= PRINCIPAL_S:
            return None
        name, most = "seconds to follow constraints", int(PRINCIPAL_S)
        quota = Quota(matcher.principal, name, round(used), most)
        return ConstraintsCostly(
            f"{path_text(matcher.field)} is slow to follow, and slow constraints of {quota.holder} used {used:.1f} s "
            f"of processor time lately; the limit is {PRINCIPAL_S:g} s, and {REFILL:g} s come back each second; use "
            "simpler constraints, or fewer at a time",
            retry_after_s=max(1.0, (used - PRINCIPAL_S) / REFILL),
            quota=quota,
        )

    def _owed(self, principal: str) -> float:
        """The seconds that ``principal`` has not got back yet."""
        now = clock.now()
        if len(self._used) >= _MOST_REMEMBERED:
            entries = self._used.items()
            self._used = {n: (used, at) for n, (used, at) in entries if used > REFILL * (now - at)}
        used, at = self._used.get(principal, (0.0, now))
        return max(0.0, used - REFILL * (now - at))
